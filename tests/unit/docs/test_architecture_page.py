"""docs/architecture.md names what there is: packages, scripts and modules, in its text and in its picture."""

import re

from tests.helpers import ROOT

PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
(PICTURE,) = re.findall(r"^```mermaid\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
#: A box: its name, and what is written in it.
DRAWN = re.compile(r"^\s*(?:subgraph )?(\w+)[\[({]+\"(.*?)\"[\])}]+$", re.MULTILINE)
ARROW = re.compile(r"\s*-->\s*|\s*-- \".*?\" -->\s*")


def test_each_arrow_of_the_picture_joins_boxes_that_are_drawn() -> None:
    boxes = [name for name, _ in DRAWN.findall(PICTURE)]
    assert len(boxes) == len(set(boxes)) > 15
    joined = [ARROW.split(line.strip()) for line in PICTURE.splitlines() if "-->" in line]
    ends = {end for line in joined for end in line}
    groups = set(re.findall(r"subgraph (\w+)", PICTURE))
    assert ends == set(boxes) - groups
    understood = re.compile(r"\s*(flowchart TD|end)$")
    for line in PICTURE.splitlines():
        assert "-->" in line or DRAWN.match(line) or understood.match(line), line


def test_scripts_modules_and_packages_of_the_picture_exist() -> None:
    labels = dict(DRAWN.findall(PICTURE))
    text = " ".join(labels.values())
    scripts = set(re.findall(r"\b(\w+\.sh)\b", text))
    assert scripts == {"job.sh", "node.sh"}
    rendered, static = ROOT / "templates/sbatch", ROOT / "slurmddp/shell"
    assert all((rendered / f"{script}.j2").is_file() or (static / script).is_file() for script in scripts)
    modules = set(re.findall(r"\bslurmddp(?:\.\w+)+", text))
    assert len(modules) == 5
    for module in modules:
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), module
    for name in ("job", "job/plan", "render", "run", "cluster", "report"):
        assert labels[name.split("/")[-1]].startswith(f"{name}: ") and (ROOT / "slurmddp" / name).is_dir()


def test_the_table_of_packages_has_all_of_them() -> None:
    table = PAGE.split("## The packages")[1].split("\n## ")[0]
    named = set(re.findall(r"^\| `slurmddp/(\w+)` \|", table, re.MULTILINE))
    assert named == {path.parent.name for path in (ROOT / "slurmddp").glob("*/__init__.py")}


def test_every_file_that_the_page_names_exists() -> None:
    named = set(re.findall(r"(?<![/\w])(?:slurmddp|templates|tests)/[\w./-]*\w", PAGE))
    assert len(named) > 10
    for path in named:
        assert (ROOT / path).exists(), path
