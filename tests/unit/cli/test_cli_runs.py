"""`slurmddp runs`: what the list says, and how little of the runs it reads."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest

from slurmddp.runs import index, submission
from slurmddp.runs.events import append_event
from slurmddp.runs.index import Entry
from slurmddp.runs.layout import RunFolder
from slurmddp.runs.submission import Submission
from tests.helpers import Desk, Result

Cli = Callable[..., Result]

#: Slurm knows the jobs in HOME/squeue, and keeps no accounting. What it was asked is kept.
SQUEUE = """#!/bin/bash
printf '%s\\n' "$*" >> "$HOME/asked"
cat "$HOME/squeue" 2>/dev/null
true
"""


class Runs:
    """Runs in the user's index."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        desk.program("squeue", SQUEUE)

    def add(
        self, number: int, *events: dict[str, Any], job_id: str = "", site: str = "gpus", hour: int = 0
    ) -> RunFolder:
        job_id = job_id or str(number)
        run = RunFolder(self.desk.project / "runs" / f"gpt-{number}")
        for folder in (run.logs, run.markers):
            folder.mkdir(parents=True)
        created = f"2026-01-{number:02d}T00:00:00+00:00"
        entry = Entry(run.id, str(run.path), created, "gpt", site, job_id)
        run.manifest.write_text(json.dumps({"run": run.id, "name": "gpt", "created": created, "site": site}))
        submission.write(run, Submission(job_id, "slurm", ("sbatch",), created, "login"))
        file = self.desk.home / ".local/state/slurmddp/runs.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as lines:
            lines.write(json.dumps(asdict(entry)) + "\n")
        for event in events:
            append_event(run.events, **event)
        return run

    @property
    def asked(self) -> list[str]:
        path = self.desk.home / "asked"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def runs(desk: Desk) -> Runs:
    return Runs(desk)


def started(job_id: str) -> dict[str, Any]:
    return {"event": "job_started", "attempt": 0, "job_id": job_id, "node": "n1", "nodes": "n[1-2]"}


def ended(job_id: str) -> dict[str, Any]:
    return {"event": "job_ended", "attempt": 0, "job_id": job_id, "exit_code": 0, "signal": "", "decision": "done"}


def states(cli: Cli) -> dict[str, str]:
    return {told["run_id"]: told["state"] for told in json.loads(cli("runs", "--json").out)}


def test_a_run_that_is_over_is_read_once(runs: Runs, cli: Cli) -> None:
    done = runs.add(1, started("1"), ended("1"))
    runs.add(2, started("2"))
    assert states(cli) == {"gpt-1": "done", "gpt-2": "lost"}
    done.markers.rmdir()
    done.submission.write_text("nobody reads this any more")
    assert states(cli) == {"gpt-1": "done", "gpt-2": "lost"}
    assert ["--jobs=1,2" in asked or "--jobs=2" in asked for asked in runs.asked] == [True, True]
    assert "--jobs=2 " in runs.asked[1], "Slurm is not asked again about a run that is over"


def test_whatever_is_written_to_its_events_makes_it_read_again(runs: Runs, cli: Cli) -> None:
    run = runs.add(1, started("1"), ended("1"))
    assert states(cli) == {"gpt-1": "done"}
    append_event(run.events, **started("1"))
    assert states(cli) == {"gpt-1": "lost"}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 1, "runs": []}', '{"version": 1, "runs": {"%s": 3}}'])
def test_summaries_that_are_lost_or_damaged(runs: Runs, cli: Cli, text: str) -> None:
    run = runs.add(1, started("1"), ended("1"))
    assert states(cli) == {"gpt-1": "done"}
    (runs.desk.home / ".local/state/slurmddp/summaries.json").write_text(text.replace("%s", str(run.path)))
    assert states(cli) == {"gpt-1": "done"}


@pytest.mark.skipif(os.getuid() == 0, reason="root writes everywhere")
def test_a_home_that_cannot_be_written_hides_no_run(runs: Runs, cli: Cli) -> None:
    runs.add(1, started("1"), ended("1"))
    index.state_folder().chmod(0o500)
    assert states(cli) == {"gpt-1": "done"}
