"""metrics.jsonl of any length, read in parts: what the parts say is what the whole says."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from slurmddp.records import json_lines
from slurmddp.records.metrics import Metrics, read
from slurmddp.records.submission import Submission
from slurmddp.run import metrics
from slurmddp.run.evidence import Evidence
from slurmddp.run.ledger import Ledger, ledger
from tests.helpers import typed

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
        begin, totals = ZERO + at, dict[str, float]()
        for step in range(first, last + 1):
            parts = {"data": 0.01 * (1 + step % 3), "forward": 0.2, "backward": 0.3, "network": 0.04, "other": 0.01}
            at += sum(parts.values()) + 0.005
            if step % 100 == 0:
                at += 0.7
                parts["checkpoint"] = 0.7
                event("checkpoint_saved", attempt, step=step, seconds=3, stall=0.7)
            totals = {part: round(totals.get(part, 0) + parts.get(part, 0), 5) for part in {**totals, **parts}}
            row = {"time": round(ZERO + at, 3), "attempt": attempt, "step": step, "start": round(begin, 3)}
            rows.append({**row, "loss": 5 / step, "seconds": totals})
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


def account(events: list[Record], rows: list[Metrics]) -> Ledger:
    found = ledger(Evidence(SENT, None, typed(*events)), rows, script=False, now=None)
    assert found is not None
    return found


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take every file for a large one."""
    monkeypatch.setattr(metrics, "SMALL", 0)


@pytest.mark.parametrize("foreign", [False, True])
@pytest.mark.usefixtures("large")
def test_a_few_lines_say_what_all_lines_say(tmp_path: Path, foreign: bool) -> None:
    """foreign: the script adds lines of its own."""
    events, rows = history()
    lines = [line for row in rows for line in (row, *([{"step": row["step"], "accuracy": 0.5}] if foreign else []))]
    few = metrics.ledger_lines(write(tmp_path / "m", lines), typed(*events))
    assert len(few) < len(rows) / 10
    whole, short = account(events, list(filter(None, map(read, rows)))), account(events, few)
    assert (short.recoveries, short.rank_starts, short.failures) == (
        whole.recoveries,
        whole.rank_starts,
        whole.failures,
    )
    assert whole.spent["lost"] > 100_000
    for kind, time in whole.spent.items():
        assert abs(short.spent[kind] - time) <= 8 * len(rows), "all but the milliseconds that each line is rounded by"


def test_a_small_file_is_read_whole(tmp_path: Path) -> None:
    events, rows = history()
    path = write(tmp_path / "m", rows[:50])
    assert [line.write() for line in metrics.ledger_lines(path, typed(*events))] == rows[:50]
    assert [line.write() for line in metrics.spread(path)] == rows[:50]
    assert metrics.ledger_lines(tmp_path / "none", typed(*events)) == metrics.spread(tmp_path / "none") == []


@pytest.mark.usefixtures("large")
def test_status_reads_little_of_a_long_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events, rows = history()
    path = write(tmp_path / "m", [{**row, "attempt": 3 * lap + row["attempt"]} for lap in range(10) for row in rows])
    looked: list[bytes] = []
    load = json_lines.load
    monkeypatch.setattr(json_lines, "load", lambda line: looked.append(line) or load(line))
    assert metrics.tail(path)[-1].write() == {**rows[-1], "attempt": 28}
    metrics.ledger_lines(path, typed(*events))
    metrics.spread(path)
    assert 0 < sum(map(len, looked)) < path.stat().st_size / 3


@pytest.mark.usefixtures("large")
def test_lines_in_no_order_and_damaged_ones(tmp_path: Path) -> None:
    rows = [{"time": ZERO + (step * 7919) % 10007, "attempt": step % 2, "step": step} for step in range(2000)]
    path = write(tmp_path / "m", rows)
    with path.open("ab") as file:
        file.write(b"\0" * 100_000 + b"\n" + b"[" * 100_000 + b"\n" + b'{"time": null, "attempt": "x"}\n')
    found = metrics.ledger_lines(path, [])
    assert found[0].write() == rows[0] and found[-1].write() == rows[-1]
    account([{"time": ZERO, "event": "started", "rank": 0, "attempt": 0}], found)
    assert metrics.spread(path)[-1].step == 1999


def test_what_a_line_says_is_read_as_it_was_written() -> None:
    line = Metrics(7, 1.5, 0, 0.5, {"data": 1.25, "network": 3.0}, {"loss": 2.0, "note": None})
    assert read(line.write()) == line
    assert line.since(None) == line.since(line._replace(start=0.25)) == {"data": 1.25, "network": 3.0}
    assert line.since(line._replace(seconds={"data": 1.0})) == {"data": 0.25, "network": 3.0}
    assert line.since(line) == {}
    odd = {"step": 3, "time": "x", "attempt": True, "seconds": {"data": None, "network": 1e99, "other": 2}}
    assert read(odd) == Metrics(3, seconds={"other": 2.0})
    for step in (None, 1.5, "3", True):
        assert read({"step": step, "time": 1.0, "attempt": 0}) is None


@pytest.mark.parametrize("length", [0, 10, 70_000, 3_000_000])
def test_the_newest_line_behind_a_long_one(tmp_path: Path, length: int) -> None:
    path = tmp_path / "m"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + b"x" * length + b"\n\n" * (length % 2) + b'{"step": 3')
    assert metrics.tail(path)[-1] == Metrics(2)
    os.truncate(path, 0)
    assert metrics.tail(path) == metrics.tail(tmp_path / "none") == []
