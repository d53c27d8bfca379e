"""The verdict of the preflight, which the supervisor and the login side read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slurmddp.records.preflight import Verdict, bad, read, warn

FOUND = Verdict({"n1": (), "n2": (bad("r", "do", "either"), warn("w", "v")), "n3": (bad("x\n", ""), bad("y", "z"))})


def test_a_verdict_is_read_as_it_was_written() -> None:
    assert read(json.loads(json.dumps(FOUND.write()))) == FOUND
    assert FOUND.lines() == ["n1 ok", "n2 bad r - do", "n2 warn w - v", "n3 bad x; y - z"]
    assert [FOUND.bad(node) for node in ("n1", "n2", "n3", "n4")] == ["", "r - do", "x; y - z", ""]
    assert (FOUND.fault("n2"), FOUND.fault("n3")) == ("either", "")


@pytest.mark.parametrize(
    "damaged", [None, 3, {}, {"nodes": []}, {"nodes": {"n1": 3}}, {"nodes": {"n1": [["odd", "a", "b"]]}}]
)
def test_what_is_no_verdict_is_refused(damaged: Any) -> None:
    with pytest.raises(ValueError, match=r"no verdict|not a finding"):
        read(damaged)
