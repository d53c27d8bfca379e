"""`slurmddp runs`: what the list says, and how little of the runs it reads."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest

from slurmddp.records.submission import Submission
from slurmddp.run import index, submission
from slurmddp.run.gate import own
from slurmddp.run.index import Entry
from slurmddp.run.layout import RunFolder
from tests.helpers import Desk, Result, append_event

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
        submission.write(own(run, to="write"), Submission(job_id, "slurm", ("sbatch",), created, "login"))
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


# --- the table


def waits(reason: str, start: str) -> str:
    """A line of squeue for a job that waits."""
    words = ("2", "PENDING", "0", start, "N/A", "1:00:00", reason, "")
    return "".join(word.ljust(width) for word, width in zip(words, (24, 20, 12, 24, 24, 20, 160, 2048), strict=True))


def test_the_table_fits_80_columns_and_says_why_a_run_waits(runs: Runs, cli: Cli) -> None:
    done = runs.add(1, {**started("1"), "time": 1000.0}, {**ended("1"), "time": 4725.0}, site="leonardo")
    (done.markers / "attempt-000.json").write_text('{"state": "done", "step": 500, "steps": 2000}')
    runs.add(2)
    (runs.desk.home / "squeue").write_text(waits("Priority", "2031-05-01T18:30:00") + "\n")
    head, first, second, why = cli("runs").out.splitlines()
    assert head.split() == ["RUN", "SITE", "STATE", "STEP", "AGE", "TIME", "NODES"]
    assert first.split()[:5] == ["gpt-1", "leonardo", "done", "25", "%"] and first.split()[-2:] == ["1:02:05", "2"]
    assert second.split()[:3] == ["gpt-2", "gpus", "pending"]
    assert why == "  waits: others have a higher priority (Priority); starts about 2031-05-01 18:30"
    assert max(map(len, (head, first, second, why))) <= 80
    assert cli("ls").out.splitlines()[:2] == cli("ps").out.splitlines()[:2] == [head, first]
    told = json.loads(cli("runs", "--json").out)
    assert told[1]["waits"] == {"reason": "Priority", "text": "others have a higher priority"}
    assert told[1]["expected_start"] == "2031-05-01T18:30:00"
    assert (told[0]["site"], told[0]["nodes"], told[0]["steps"]) == ("leonardo", 2, 2000)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ((), ["gpt-1", "gpt-2", "gpt-3"]),
        (("-n", "2"), ["gpt-2", "gpt-3"]),
        (("--state", "done"), ["gpt-1", "gpt-3"]),
        (("--state", "done", "-n", "1"), ["gpt-3"]),
        (("--state", "done", "--state", "lost", "--site", "gpus"), ["gpt-1", "gpt-2"]),
        (("--site", "lumi"), ["gpt-3"]),
        (("--since", "2026-01-02"), ["gpt-2", "gpt-3"]),
        (("--since", "1m"), []),
    ],
)
def test_filters(runs: Runs, cli: Cli, options: tuple[str, ...], found: list[str]) -> None:
    runs.add(1, started("1"), ended("1"))
    runs.add(2, started("2"))
    runs.add(3, started("3"), ended("3"), site="lumi")
    assert [told["run_id"] for told in json.loads(cli("runs", "--json", *options).out)] == found


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [("--state", "runing", "states: done,"), ("--since", "yesterday", "write 30m, 12h"), ("--since", "9" * 9, "12h")],
)
def test_filters_that_mean_nothing(cli: Cli, option: str, value: str, message: str) -> None:
    done = cli("runs", option, value)
    assert done.code == 2 and message in done.err


def test_without_a_name_the_last_run_is_meant(runs: Runs, cli: Cli) -> None:
    runs.add(1, started("1"), ended("1"))
    runs.add(2, started("2"), ended("2"))
    assert cli("status").out.splitlines()[0] == "run      gpt-2"
    assert cli("status", "--time", "--json").out.startswith('{"run_id": "gpt-2"')
    assert "already over" in cli("stop", "--yes").out


def test_a_beginning_of_several_ids_names_them(runs: Runs, cli: Cli) -> None:
    runs.add(1)
    runs.add(2)
    for command in ("status", "logs", "cancel"):
        done = cli(command, "gpt-")
        assert done.code == 2 and "gpt-1" in done.err and "gpt-2" in done.err


def test_an_unknown_site_is_refused(desk: Desk, cli: Cli) -> None:
    runs = Runs(desk)
    runs.add(1, started("1"), ended("1"), site="removed")
    shown = cli("runs", "--site", "gpsu")
    assert (shown.code, shown.out) == (2, "") and "unknown site 'gpsu'\n  -> did you mean gpus?" in shown.err
    assert cli("runs", "--site", "gpus").out == "no runs\n"
    assert "gpt-1" in cli("runs", "--site", "removed").out, "a site whose profile is gone"
    desk.write("mine.yaml", "name: removed\ntitle: t\n")
    assert "gpt-1" in cli("runs", "--site", "./mine.yaml").out, "a site file"
    assert cli("runs", "--site", "./none.yaml").code == 2
