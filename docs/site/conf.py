"""Sphinx configuration. `make docs` builds the site from the repository's root: README.md and docs/ are its pages."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]

from generate import write_pages  # noqa: E402

from slurmddp import __version__  # noqa: E402

project = "slurmddp"
version = release = __version__
root_doc = "docs/index"
extensions = ["myst_parser", "sphinx_copybutton", "extras"]
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "tests/README.md",
    "tests/cluster/README.md",
    "benchmarks/script_facts.md",
    "tests/security.md",
    "docs/*.md",
    "docs/generated/**",
]
myst_heading_anchors = 4
html_theme = "furo"
html_static_path = [str(HERE / "static"), str(ROOT / "docs" / "generated" / "static")]
html_css_files = ["site.css"]
copybutton_selector = "div.highlight-bash pre, div.highlight-yaml pre, div.highlight-python pre"
html_title = f"slurmddp {__version__}"
html_show_sphinx = html_show_copyright = False
smartquotes = False  # --option stays --option
# Pygments has no lexer for the picture of docs/architecture.md, which stays text.
suppress_warnings = ["misc.highlighting_failure"]

(ROOT / "docs" / "generated" / "static").mkdir(parents=True, exist_ok=True)
write_pages(ROOT / "docs" / "generated")
