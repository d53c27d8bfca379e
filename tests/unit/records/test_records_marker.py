"""Markers, as the supervisor reads them."""

from __future__ import annotations

from typing import Any

import pytest

from slurmddp.records.marker import Marker, read


@pytest.mark.parametrize(
    ("record", "marker"),
    [
        ({"state": "stopped", "reason": "x", "signal": None, "attempt": 3}, Marker("stopped", "x")),
        (
            {"state": "stopped", "reason": "x", "signal": {"name": "SIGTERM", "rank": 1, "node": "n2"}},
            Marker("stopped", "x", "", (1, "n2")),
        ),
        ({"state": "stopped", "signal": {"name": "SIGUSR1", "rank": 1, "node": "n2"}}, Marker("stopped")),
        ({"state": "failed", "cause": "y", "signal": {"name": "SIGTERM", "rank": 1}}, Marker("failed", "", "y")),
        ({"state": 3, "reason": ["x"], "signal": "SIGTERM received by rank 1 on n2"}, Marker()),
        ({}, Marker()),
    ],
)
def test_a_marker_is_read_and_what_is_not_sound_is_left_out(record: dict[str, Any], marker: Marker) -> None:
    assert read(record) == marker
