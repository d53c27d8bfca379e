"""Markers, as the supervisor reads them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slurmddp.records.marker import Marker, Signal, parse, read

USR1 = Signal("SIGUSR1", 1, "n2")


@pytest.mark.parametrize(
    ("record", "marker"),
    [
        ({"state": "stopped", "reason": "x", "signal": None, "attempt": 3}, Marker("stopped", "x")),
        (
            {"state": "stopped", "reason": "x", "signal": {"name": "SIGTERM", "rank": 1, "node": "n2"}},
            Marker("stopped", "x", "", Signal("SIGTERM", 1, "n2")),
        ),
        ({"state": "stopped", "signal": {"name": "SIGUSR1", "rank": 1, "node": "n2"}}, Marker("stopped", signal=USR1)),
        ({"state": "failed", "cause": "y", "signal": {"name": "SIGTERM", "rank": 1}}, Marker("failed", "", "y")),
        ({"state": 3, "reason": ["x"], "signal": "SIGTERM received by rank 1 on n2"}, Marker()),
        ({}, Marker()),
    ],
)
def test_a_marker_is_read_and_what_is_not_sound_is_left_out(record: dict[str, Any], marker: Marker) -> None:
    assert read(record) == marker


def test_what_is_written_is_read_back() -> None:
    marker = Marker("stopped", "x", "y", Signal("SIGTERM", None, "n2"), 3, 9, {"loss": 0.5})
    text = marker.text(4)
    assert (parse(text), json.loads(text)["attempt"], marker.terminated) == (marker, 4, True)
    assert parse("{") == parse("3") == Marker()
    assert not Marker("stopped", signal=USR1).terminated
