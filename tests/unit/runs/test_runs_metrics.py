"""metrics.jsonl of any length, read in parts: what the parts say is what the whole says."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from slurmddp.runs import metrics
from slurmddp.runs.events import record_of
from slurmddp.runs.evidence import Evidence
from slurmddp.runs.ledger import Ledger, ledger
from slurmddp.runs.submission import Submission

ZERO = 1_700_000_000
SENT = Submission("7", "slurm", ("sbatch",), "2023-11-14T22:13:20+00:00", "login")
Record = dict[str, Any]

#: (attempt, first step, last step, how it ended): a crash inside an attempt, a requeue, and a clean end. The second
#: start resumes right behind the last line of the first one, so only the events tell them apart.
STARTS = ((0, 1, 900, "error"), (0, 901, 2500, "killed"), (1, 2001, 6000, "finished"))


def history() -> tuple[list[Record], list[Record]]:
    """Events and lines of a run with three starts of the ranks, a line per step, a checkpoint every 100 steps."""
    events: list[Record] = []
    rows: list[Record] = []
    at = 60.0

    def event(name: str, attempt: int, rank: int | None = 0, **facts: Any) -> None:
        who = {} if rank is None else {"rank": rank}
        events.append({"time": ZERO + at, "event": name, "attempt": attempt, "node": "n1", **who, **facts})

    started = -1
    for attempt, first, last, end in STARTS:
        if attempt != started:
            event("job_started", attempt, None, job_id="7")
            started = attempt
        at += 10
        event("rank_started", attempt, seconds=4)
        at += 5
        event("resumed", attempt, step=first - 1)
        event("ready", attempt, step=first - 1)
        for step in range(first, last + 1):
            parts = {"data": 0.01 * (1 + step % 3), "forward": 0.2, "backward": 0.3, "network": 0.04, "other": 0.01}
            at += sum(parts.values()) + 0.005
            if step % 100 == 0:
                at += 0.7
                parts["checkpoint"] = 0.7
                event("checkpoint_saved", attempt, step=step, seconds=3, stall=0.7)
            row = {"time": ZERO + at, "attempt": attempt, "step": step, "loss": 5 / step, "seconds": parts}
            rows.append(row)
            if step == first:
                event("first_step", attempt, step=step, seconds=9)
        at += 3
        if end == "error":
            event("error", attempt, kind="ValueError", message="x")
        elif end == "finished":
            event("finished", attempt, step=last)
            event("job_ended", attempt, None, exit_code=0, signal="")
        else:
            at += 100
    return events, rows


def write(path: Path, rows: list[Record]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"torn": ')
    return path


def account(events: list[Record], rows: list[Record]) -> Ledger:
    found = ledger(Evidence(SENT, None, events), rows, script=False, now=None)
    assert found is not None
    return found


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take every file for a large one."""
    monkeypatch.setattr(metrics, "SMALL", 0)


def test_the_condensed_lines_say_what_all_lines_say(tmp_path: Path, large: None) -> None:
    events, rows = history()
    few, exact = metrics.read(write(tmp_path / "m", rows), events, quick=False)
    assert exact and len(few) < len(rows) / 10
    whole, short = account(events, rows), account(events, few)
    assert (short.recoveries, short.rank_starts, short.failures) == (
        whole.recoveries,
        whole.rank_starts,
        whole.failures,
    )
    assert whole.spent["lost"] > 100_000
    for kind, time in whole.spent.items():
        assert abs(short.spent[kind] - time) <= 8 * len(rows), "all but the milliseconds that each line is rounded by"


def test_some_of_the_lines_say_about_the_same(tmp_path: Path, large: None) -> None:
    events, rows = history()
    some, exact = metrics.read(write(tmp_path / "m", rows), events, quick=True)
    assert not exact and len(some) < len(rows) / 10
    whole, short = account(events, rows), account(events, some)
    assert (short.recoveries, short.rank_starts, short.failures) == (
        whole.recoveries,
        whole.rank_starts,
        whole.failures,
    )
    for kind, time in whole.spent.items():
        assert abs(short.spent[kind] - time) <= 0.01 * whole.wall, kind


def test_a_small_file_is_read_whole(tmp_path: Path) -> None:
    events, rows = history()
    path = write(tmp_path / "m", rows[:50])
    assert metrics.read(path, events, quick=True) == (rows[:50], True)
    assert metrics.spread(path) == rows[:50]
    assert metrics.read(tmp_path / "none", events, quick=True) == ([], True)


@pytest.mark.usefixtures("large")
def test_status_reads_little_of_a_long_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, rows = history()
    path = write(tmp_path / "m", rows * 10)
    looked: list[bytes] = []
    monkeypatch.setattr(metrics, "record_of", lambda line: looked.append(line) or record_of(line))
    assert metrics.tail(path)[-1] == rows[-1]
    metrics.estimated(path, [])
    assert sum(map(len, looked)) < path.stat().st_size / 3


@pytest.mark.usefixtures("large")
def test_times_in_no_order_and_damaged_lines_cost_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"time": ZERO + (step * 7919) % 10007, "attempt": step % 2, "step": step} for step in range(60_000)]
    path = write(tmp_path / "m", rows)
    with path.open("ab") as file:
        file.write(b"\0" * 100_000 + b"\n" + b"[" * 100_000 + b"\n" + b'{"time": null, "attempt": "x"}\n')
    events = [{"time": ZERO + second, "event": "started", "rank": 0} for second in range(0, 10_000, 10)]
    looks = 0
    lines = metrics._lines

    def count(*args: Any, **options: Any) -> Any:
        nonlocal looks
        looks += 1
        return lines(*args, **options)

    monkeypatch.setattr(metrics, "_lines", count)
    account([*events, {"time": ZERO, "event": "started", "rank": 0, "attempt": 0}], metrics.estimated(path, events))
    assert looks <= metrics._LOOKS * 2 + metrics._POINTS * 2
    account(events, metrics.condensed(path, events))


@pytest.mark.parametrize("length", [0, 10, 70_000, 3_000_000])
def test_the_newest_line_behind_a_long_one(tmp_path: Path, length: int) -> None:
    path = tmp_path / "m"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + b"x" * length + b"\n\n" * (length % 2) + b'{"step": 3')
    assert metrics.tail(path)[-1] == {"step": 2}
    os.truncate(path, 0)
    assert metrics.tail(path) == metrics.tail(tmp_path / "none") == []
