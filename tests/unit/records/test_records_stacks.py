"""Lines of `slurmddp debug stacks`: written and read in one place."""

from __future__ import annotations

import pytest

from slurmddp.records.stacks import Line, Rank, read, write

RANK = Rank(2, 4, 12, "S", "asked", "node2")


@pytest.mark.parametrize("found", [RANK, Line(2, '  File "a b", line 3 in ü'), Line(0, "")])
def test_what_is_written_is_read(found: Rank | Line) -> None:
    assert write(found).endswith("\n") and read(write(found).rstrip("\n")) == found


@pytest.mark.parametrize(
    "text",
    ["", "srun: error", "{", "[]", '{"rank": 1}', write(RANK)[:30], write(RANK).replace('"schema": 1', '"schema": 2')],
)
def test_other_lines_are_not_ours(text: str) -> None:
    assert read(text) is None
