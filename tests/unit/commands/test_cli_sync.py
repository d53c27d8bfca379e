"""`slurmddp sync`: what a tracker gets, once each, over restarts, requeues and syncs that fail."""

import fcntl
import json
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import pytest

from slurmddp.run.layout import RunFolder
from slurmddp.trackers import sync as module
from slurmddp.trackers.base import Facts, Point
from tests.helpers import Desk, Result, append_event

Cli = Callable[..., Result]

#: Slurm knows the job until the file `over` is there.
SCONTROL = """#!/bin/bash
[ -e over ] && { echo 'Invalid job id specified' >&2; exit 1; }
echo "JobId=7 JobName=gpt UserId=a(1) JobState=RUNNING Reason=None TimeLimit=04:00:00 NodeList=n[1-2] Features=x"
"""
JOB = """\
name: gpt
site: gpus
resources: {account: secret-project, nodes: 2}
environment: {WHO: me}
train: {task: lm, batch: {global: 512}, args: [--lr, "3e-4"], seed: null}
"""


class Recorder:
    """A tracker that keeps what it gets, and fails at one of the points."""

    durable = True
    fails_at: ClassVar[int | None] = None
    closes = True
    calls: ClassVar[list[Any]] = []

    def __init__(self, facts: Facts, key: str | None) -> None:
        self.where, self.key = "the list", key or "new"
        self.calls.append(("open", key))
        type(self).facts = facts  # type: ignore[attr-defined]

    def send(self, points: Sequence[Point]) -> None:
        for point in points:
            if point.number == self.fails_at:
                raise ConnectionResetError("no route")
            self.calls.append(point)

    def close(self, state: str | None) -> None:
        if not self.closes:
            raise ConnectionResetError("no route")
        self.calls.append(("close", state))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Recorder]]:
    monkeypatch.setitem(module.TRACKERS, "fake", "Tracker")
    fake = types.ModuleType("slurmddp.trackers.fake")
    tracker = type("Tracker", (Recorder,), {"calls": []})
    fake.Tracker = tracker  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "slurmddp.trackers.fake", fake)
    yield tracker


@pytest.fixture
def run(desk: Desk) -> RunFolder:
    """A run that goes on, with two lines of metrics."""
    folder = RunFolder(desk.project / "runs" / "gpt-1")
    folder.path.mkdir(parents=True)
    facts = {"schema": 1, "run": "gpt-1", "name": "gpt", "created": "2026-01-01T00:00:00+00:00", "site": "gpus"}
    folder.manifest.write_text(json.dumps(facts))
    folder.job_yaml.write_text(JOB)
    told = {"job_id": "7", "scheduler": "slurm", "command": [], "time": "2026-01-01T00:00:00+00:00", "host": "h"}
    folder.submission.write_text(json.dumps(told))
    append_event(folder.events, "job_started", attempt=0, job_id="7", node="n1", nodes="n[1-2]")
    for name, text in (("scontrol", SCONTROL), ("squeue", "#!/bin/bash\nexit 0\n")):
        desk.program(name, text)
    add(folder, 10, 20)
    return folder


def add(run: RunFolder, *steps: int, attempt: int = 0, **more: Any) -> None:
    with run.metrics.open("a") as file:
        for step in steps:
            row = {"time": 100.0 + step, "attempt": attempt, "step": step, "loss": 2.0 / step, **more}
            file.write(json.dumps(row) + "\n")


def end(desk: Desk, run: RunFolder, decision: str = "done") -> None:
    """The run is over, which Slurm forgets some time after job.sh has written it."""
    append_event(run.events, "job_ended", attempt=0, job_id="7", exit_code=int(decision != "done"), decision=decision)
    time.sleep(1)
    desk.write("over")


def steps(tracker: type[Recorder]) -> list[int]:
    return [call.step for call in tracker.calls if isinstance(call, Point)]


def test_each_line_is_sent_once(run: RunFolder, desk: Desk, cli: Cli, recorder: type[Recorder]) -> None:
    done = cli("sync", str(run.path), "--to", "fake")
    assert (done.code, done.out) == (0, "sent    2 lines of metrics.jsonl, up to step 20\nto      the list\n"), done.err
    assert recorder.calls.pop(0) == ("open", None) and recorder.calls.pop() == ("close", None)
    assert recorder.calls == [
        Point(1, 110.0, 10, {"attempt": 0, "loss": 0.2}),
        Point(2, 120.0, 20, {"attempt": 0, "loss": 0.1}),
    ]
    recorder.calls.clear()
    again = cli("sync", str(run.path), "--to", "fake")
    assert again.out == "sent    nothing: no new lines\nto      the list\n" and recorder.calls == []
    # A restart from step 10: step 20 comes again. A damaged line, one without a step, and one that is being written.
    add(run, 20, attempt=1, seconds={"data": 0.5, "network": None}, lr=None, note="x", skipped=1, mfu=float("inf"))
    with run.metrics.open("a") as file:
        file.write('no JSON\n{"time": 1.0}\n{"time": 130.0, "step": 30')
    assert json.loads(cli("sync", str(run.path), "--to", "fake", "--json").out) == {
        "run_id": "gpt-1", "to": "fake", "where": "the list", "lines": 1, "step": 20,
    }  # fmt: skip
    values = {"attempt": 1.0, "loss": 0.1, "skipped": 1.0, "seconds/data": 0.5}
    assert recorder.calls == [("open", "new"), Point(3, 120.0, 20, values, again=True), ("close", None)]
    recorder.calls.clear()
    with run.metrics.open("a") as file:
        file.write(', "loss": 1}\n')
    end(desk, run, "failed")
    cli("sync", str(run.path), "--to", "fake")
    assert recorder.calls == [("open", "new"), Point(4, 130.0, 30, {"loss": 1.0}), ("close", "failed")]
    cli("sync", str(run.path), "--to", "fake")
    assert len(recorder.calls) == 3, "neither lines nor the end are told again"


def test_the_tracker_is_told_no_account_and_no_variable(run: RunFolder, cli: Cli, recorder: type[Recorder]) -> None:
    cli("sync", str(run.path), "--to", "fake")
    facts = recorder.facts  # type: ignore[attr-defined]
    assert (facts.run_id, facts.job_name, facts.folder) == ("gpt-1", "gpt", run.path / "trackers")
    assert facts.settings == {
        "site": "gpus", "slurmddp": None, "train.task": "lm", "train.batch.global": 512, "train.args": ["--lr", "3e-4"],
    }  # fmt: skip


@pytest.mark.parametrize(("durable", "closes", "first"), [(True, False, 1001), (False, True, 1001), (False, False, 1)])
def test_a_sync_that_fails_goes_on_where_it_was(
    run: RunFolder, cli: Cli, recorder: type[Recorder], durable: bool, closes: bool, first: int
) -> None:
    add(run, *range(30, 12000, 10))
    recorder.durable, recorder.closes, recorder.fails_at = durable, closes, 1100
    failed = cli("sync", str(run.path), "--to", "fake")
    assert failed.code == 1 and "slurmddp: fake: no route\n  -> run the same command again" in failed.err
    assert [point.number for point in recorder.calls if isinstance(point, Point)] == list(range(1, 1100))
    recorder.calls.clear()
    recorder.fails_at, recorder.closes = None, True
    assert f"sent    {1200 - first} lines" in cli("sync", str(run.path), "--to", "fake").out
    assert [point.number for point in recorder.calls if isinstance(point, Point)] == list(range(first, 1200))


def test_evaluations_are_sent_in_their_order(
    run: RunFolder, cli: Cli, recorder: type[Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluated(step: int, time: float, loss: float) -> None:
        told = {"step": step, "seconds": 1.0, "loss": loss, "count": 10, "samples": 5, "top1": 0.5, "what": "x"}
        append_event(run.events, "evaluated", attempt=0, job_id="7", node="n1", rank=0, time=time, **told)

    evaluated(10, 110.5, 1.0)
    evaluated(20, 120.5, 0.9)
    told = cli("sync", str(run.path), "--to", "fake")
    assert told.out.startswith("sent    2 lines of metrics.jsonl, up to step 20\n")
    first = [
        Point(1, 110.0, 10, {"attempt": 0, "loss": 0.2}),
        Point(2, 110.5, 10, {"validation/loss": 1.0, "validation/top1": 0.5}),
        Point(3, 120.0, 20, {"attempt": 0, "loss": 0.1}),
        Point(4, 120.5, 20, {"validation/loss": 0.9, "validation/top1": 0.5}),
    ]
    assert [call for call in recorder.calls if isinstance(call, Point)] == first
    recorder.calls.clear()
    add(run, 40)
    evaluated(40, 140.5, 0.8)
    cli("sync", str(run.path), "--to", "fake")
    assert [(call.number, call.step, call.again) for call in recorder.calls if isinstance(call, Point)] == [
        (5, 40, False), (6, 40, False),
    ]  # fmt: skip
    recorder.calls.clear()
    # What a sync that was killed sends again has the numbers of before, whatever has been written since.
    (run.path / "trackers/fake.json").unlink()
    cli("sync", str(run.path), "--to", "fake")
    assert [call for call in recorder.calls if isinstance(call, Point)][:4] == first


def test_follow_until_the_run_is_over(
    run: RunFolder, desk: Desk, cli: Cli, recorder: type[Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slurmddp.commands.sync.ASK_EVERY", 0.2)

    def finish() -> None:
        add(run, 30)
        end(desk, run)

    timer = threading.Timer(0.5, finish)
    timer.start()
    assert "sent    3 lines" in cli("sync", str(run.path), "--to", "fake", "--follow").out
    timer.join()
    assert steps(recorder) == [10, 20, 30] and recorder.calls[-1] == ("close", "done")
    assert [call[0] for call in recorder.calls if not isinstance(call, Point)] == ["open", "close"]


def test_refusals(run: RunFolder, cli: Cli, recorder: type[Recorder], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wandb", "mlflow", "tensorboard.compat.proto.event_pb2"):
        monkeypatch.setitem(sys.modules, name, None)
    wrong = cli("sync", str(run.path), "--to", "comet")
    assert wrong.code == 2 and "use one of wandb, mlflow, tensorboard, fake" in wrong.err
    for to, package in (("wandb", "wandb"), ("mlflow", "mlflow-skinny"), ("tensorboard", "tensorboard")):
        missing = cli("sync", str(run.path), "--to", to)
        assert missing.code == 2 and f"the library {package} cannot be imported" in missing.err
        assert f"-> pip install {package}, into the Python of slurmddp" in missing.err
    place = run.path / "trackers"
    with (place / "fake.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        busy = cli("sync", str(run.path), "--to", "fake")
        assert busy.code == 2 and "another sync of run gpt-1 to fake is running" in busy.err
    (place / "fake.json").write_text('{"offset": 1, "more": 2}')
    damaged = cli("sync", str(run.path), "--to", "fake")
    assert damaged.code == 2 and f"{place}/fake.json: is damaged" in damaged.err
    for path in place.iterdir():
        path.unlink()
    place.rmdir()
    place.write_text("")
    closed = cli("sync", str(run.path), "--to", "fake")
    assert closed.code == 2 and "-> copy the run folder, then sync the copy" in closed.err
    assert recorder.calls == []
