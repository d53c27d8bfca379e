"""docs/benchmarks.md: each table says when, of which commit and by which program it was measured."""

import ast
import re
import subprocess

import pytest

from benchmarks import page
from tests.helpers import ROOT

TEXT = page.PAGE.read_text(encoding="utf-8")
BLOCK = re.compile(r"<!-- measured by benchmarks\.(\w+) -->\n\n(.*?)\n<!-- end of benchmarks\.\1 -->\n", re.DOTALL)
STAMP = re.compile(r"(\d{4}-\d\d-\d\d), commit ([0-9a-f]{7,12}), `python -m benchmarks\.(\w+)`: .+\.$")
BLOCKS = {found[1]: found[2] for found in BLOCK.finditer(TEXT)}


def test_no_table_stands_outside_of_a_measured_block() -> None:
    assert [line for line in BLOCK.sub("", TEXT).splitlines() if line.startswith("|")] == []


@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_a_table_has_its_date_commit_and_program(name: str) -> None:
    found = STAMP.match(BLOCKS[name].splitlines()[0])
    assert found is not None, BLOCKS[name].splitlines()[0]
    assert found[3] == name
    assert ast.get_docstring(ast.parse((ROOT / "benchmarks" / f"{name}.py").read_text())) is not None
    assert BLOCKS[name].count("|---|") >= 1


@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_the_commit_of_a_table_exists_and_is_not_younger_than_its_date(name: str) -> None:
    found = STAMP.match(BLOCKS[name].splitlines()[0])
    assert found is not None
    git = ["git", "-C", str(ROOT)]
    shallow = subprocess.run([*git, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True)
    if shallow.stdout.strip() != "false":
        pytest.skip("no whole git history here")
    shown = subprocess.run([*git, "log", "-1", "--format=%cs", found[2]], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.strip() <= found[1]


def test_a_table_is_written_between_its_marks_and_read_again() -> None:
    begin, end = page.marks("x")
    figures = [page.Figure("ratio", [0.9, 1.0, 1.1], target=0.95), page.Figure("time", [2.0], "s")]
    rows = page.HEAD + "".join(each.row() for each in figures)
    written = page.replaced(f"before\n{begin}old\n{end}after\n", "x", f"stamp\n\n{rows}")
    assert written.startswith("before\n") and written.endswith("after\n") and "old" not in written
    assert "0.95, missed" in written
    assert page.published(written, "x") == {"ratio": (1.0, 0.9, 1.1), "time": (2.0, 2.0, 2.0)}
    with pytest.raises(ValueError, match="has no <!-- measured by benchmarks"):
        page.replaced("no marks", "x", rows)


def test_moved_names_what_left_both_spreads_and_nothing_else() -> None:
    before = {"a": page.Published(0.82, 0.78, 0.86), "b": page.Published(1.0, 0.9, 1.1)}
    now = [page.Figure("a", [1.2, 1.24, 1.3]), page.Figure("b", [1.05, 1.2, 1.3]), page.Figure("c", [1.0])]
    assert page.moved(before, now) == [
        "a: 1.24 (1.2 to 1.3), published 0.82 (0.78 to 0.86)",
        "c: not in the page",
    ]
