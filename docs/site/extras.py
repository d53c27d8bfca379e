"""A Sphinx extension: languages of indented blocks, and the sections that static/search.js searches."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes

HERE = Path(__file__).parent
#: Where conf.py looks for what is made here.
MADE = HERE.parent / "generated" / "static"
PROGRAMS = frozenset((HERE / "programs.txt").read_text(encoding="utf-8").split())
#: Pages for developers: the search answers users.
NOT_SEARCHED = (
    *("CHANGELOG", "CONTRIBUTING", "SECURITY"),
    *("tests/", "benchmarks/", "docs/architecture", "docs/benchmarks"),
)


def setup(app: Any) -> dict[str, bool]:
    app.connect("doctree-read", _set_languages)
    app.connect("env-updated", _write_sections)
    app.connect("html-page-context", _add_search)
    return {"parallel_read_safe": True}


def _set_languages(app: Any, doctree: nodes.document) -> None:
    for block in doctree.findall(nodes.literal_block):
        if "language" not in block or block["language"] in ("default", "none"):
            block["language"] = language(block.astext())


def _write_sections(app: Any, env: Any) -> None:
    """Write page, title, anchor and own text of each section, for the search. Sphinx's own index knows only pages."""
    names = sorted(name for name in env.found_docs if not name.startswith(NOT_SEARCHED))
    found = [[name, *section] for name in names for section in _sections(env.get_doctree(name))]
    MADE.mkdir(parents=True, exist_ok=True)
    (MADE / "sections.js").write_text(f"const SECTIONS = {json.dumps(found)};\n", encoding="utf-8")


def _add_search(app: Any, page: str, *_: Any) -> None:
    if page == "search":
        app.add_js_file("sections.js")
        app.add_js_file("search.js")


def _sections(doctree: nodes.document) -> Iterator[tuple[str, str, str]]:
    for section in doctree.findall(nodes.section):
        title = section.next_node(nodes.title)
        own = [node.astext() for node in section.children if not isinstance(node, nodes.section | nodes.title)]
        yield (title.astext() if title else "", section["ids"][0], " ".join(own))


def language(text: str) -> str:
    """Return what an indented block is: commands, Python, a job file, or what a command prints."""
    first = next((line for line in text.splitlines() if line.strip() and not line.startswith("#")), "")
    if first.split(" ")[0] in PROGRAMS:
        return "bash"
    if re.match(r"(import|from|def|with|if|stop =) ?|\w+(\.\w+)+\(", first):
        return "python"
    if re.match(r"[a-z_]+:( |$)", first):
        return "yaml"
    return "text"
