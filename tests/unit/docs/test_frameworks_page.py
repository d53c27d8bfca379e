"""docs/frameworks.md: tests/cluster/test_frameworks.py writes its table, in minutes. Here its names are checked."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_table_has_a_row_for_each_script() -> None:
    page = (ROOT / "docs/frameworks.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .*`slurmddp submit examples/frameworks/(\w+\.py)", page, re.M)
    assert set(rows) == {path.name for path in (ROOT / "examples/frameworks").glob("*.py")}
