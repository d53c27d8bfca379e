"""A marker on its way from the run folder to the brain: by the folder's child process, as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurmddp.records.marker import Marker, Signal
from slurmddp.supervisor.files import Files
from slurmddp.supervisor.watching import marker_of

ASKED = {"state": "stopped", "reason": "SIGTERM received by rank 1 on n2"}


@pytest.mark.parametrize(
    ("text", "marker"),
    [
        (None, None),
        ("{damaged", Marker()),
        ("[3]", Marker()),
        (json.dumps({**ASKED, "signal": None}), Marker("stopped", ASKED["reason"])),
        (
            json.dumps({**ASKED, "signal": {"name": "SIGTERM", "rank": 1, "node": "n2"}}),
            Marker("stopped", ASKED["reason"], "", Signal("SIGTERM", 1, "n2")),
        ),
        (json.dumps({"state": "failed", "cause": "two\nlines"}), Marker("failed", "", "two")),
    ],
)
def test_a_marker_reaches_the_brain_as_fields(tmp_path: Path, text: str | None, marker: Marker | None) -> None:
    (tmp_path / "markers").mkdir()
    if text is not None:
        (tmp_path / "markers/attempt-003.json").write_text(text)
    assert marker_of(json.loads(json.dumps(Files(str(tmp_path)).marker(3)))) == marker
