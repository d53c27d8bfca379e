"""The event of the end of Slurm's hold is of the same type as its reader's."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from slurmddp.records.events import Event, parse
from slurmddp.records.job_events import HoldReleased
from slurmddp.supervisor.loop import Loop
from slurmddp.supervisor.requeue import Requeue

HELD = "JobId=7 JobState=PENDING Reason=BeginTime Restarts=1"


def test_the_end_of_a_hold_is_an_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/bash\n[[ $1 == update ]] || echo '{HELD}'\n")
    scontrol.chmod(0o755)
    squeue = tmp_path / "squeue"
    squeue.write_text("#!/bin/sh\n")  # no step lives
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    requeue = Requeue(Loop(), "7_1", "7", "n1", str(tmp_path))
    requeue.attempt = 3
    before = time.time()
    requeue.by_others([])
    events, end = tmp_path / "events.jsonl", time.monotonic() + 60
    while not (events.exists() and events.read_bytes().endswith(b"\n")) and time.monotonic() < end:
        time.sleep(0.2)
    event = parse(events.read_bytes())
    assert event is not None and event.time is not None and event.time >= before - 1
    assert event._replace(time=None) == Event(HoldReleased(), None, 3, "7", "n1")
