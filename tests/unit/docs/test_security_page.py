"""docs/security.md: each row of the table of defences names tests that exist."""

from __future__ import annotations

import re

import pytest

from tests.helpers import ROOT

PAGE = (ROOT / "docs/security.md").read_text(encoding="utf-8")
TABLE = PAGE.split("\n## How each was tested\n")[1]
ROWS = dict(re.findall(r"^\| (?!Defence)([^|]+) \| ([^|]+) \|$", TABLE, re.MULTILINE))


def test_each_row_of_the_table_is_read() -> None:
    assert len(ROWS) == len(re.findall(r"^\|", TABLE, re.MULTILINE)) - 2  # its heading, and the line below that


@pytest.mark.parametrize("defence", ROWS)
def test_the_tests_of_a_defence_exist(defence: str) -> None:
    folder = ROOT / "tests"
    for name in ROWS[defence].split(", "):
        assert re.fullmatch(r"(\w+/)*test_\w+\.py", name), name
        if "/" in name:
            folder = (ROOT / "tests" / name).parent
        path = folder / name.rpartition("/")[2]  # a bare name is in the folder of the one before it
        assert re.search(r"^ *def test_", path.read_text(encoding="utf-8"), re.MULTILINE), path
