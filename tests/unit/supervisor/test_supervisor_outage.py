"""A run folder that goes away while the job runs: the job goes back into the queue, but not for ever."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurmddp.records.cause import Cause
from slurmddp.records.job_events import AttemptEnded
from slurmddp.records.progress import Failure, stuck
from slurmddp.supervisor import job as supervisor
from slurmddp.supervisor import order
from slurmddp.supervisor.attempt import Attempts
from slurmddp.supervisor.brain.ledger import count_failure
from slurmddp.supervisor.brain.types import Job, Ledger, Settings
from slurmddp.supervisor.files import Files

AWAY = Cause("/run does not answer")


def started(step: int) -> dict[str, Any]:
    return {"event": "job_started", "step": step} if step else {"event": "job_started"}


def begin(run: Path, events: list[dict[str, Any]], attempt: int, step: int) -> dict[str, Any]:
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (run / "progress").write_text(f"{step}\n")
    return Files(str(run)).begin(attempt)


@pytest.mark.parametrize(
    ("events", "attempt", "unended"),
    [
        ([], 0, []),
        ([started(0)], 1, [70]),
        ([started(0), {"event": "attempt_ended", "attempt": 0}], 2, [70]),
        ([started(0), {"event": "attempt_ended", "attempt": 0}, {"event": "job_ended", "attempt": 0}], 1, []),
        ([{"event": "job_ended", "attempt": 0}, started(0), started(30), started(60)], 4, [30, 60, 70]),
        ([started(0), {"event": "requeued", "attempt": 0}], 4, [70, 70, 70]),  # the disk was full
    ],
)
def test_what_earlier_starts_could_not_record_is_seen(
    tmp_path: Path, events: list[dict[str, Any]], attempt: int, unended: list[int]
) -> None:
    found = begin(tmp_path, events, attempt, 70)
    assert (found["unended"], found["step"]) == (unended, 70)


class Outage:
    """A job whose run folder answers nothing any more. did: the alerts, and whether it was put back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, unended: tuple[int, ...], failures: tuple[Failure, ...] = ()):
        self.did: list[str] = []
        self.events: list[Any] = []
        watch = SimpleNamespace(ledger=Ledger(failures))
        folder = SimpleNamespace(known=lambda default, *_, **__: default, tell=lambda *_: None, confirm=lambda: None)
        self.job: Any = SimpleNamespace(
            attempt=5, exit_code=0, ending="", unended=unended, decision="next", cause=None, ended_by="", kept="",
            settings=Settings("/run", breaker=3), messages=SimpleNamespace(), watch=watch, folder=folder,
            scheduler=SimpleNamespace(job=Job("RUNNING")), nodes=SimpleNamespace(suspects=[]), saved=lambda: None,
            stop_file=lambda: None, ledger=lambda: watch.ledger, keep=self.keep, say=lambda _: None,
            event=self.events.append, alert=lambda kind, *_: self.did.append(kind),
            send=lambda alert: self.did.append(alert.kind), moment=lambda: None,
        )  # fmt: skip
        monkeypatch.setattr(order, "put_back", lambda *_: not self.did.append("put back"))

    def keep(self, before: Ledger, after: Ledger) -> None:
        self.job.watch.ledger = after

    def end(self) -> str:
        attempts = Attempts.__new__(Attempts)
        attempts.job = self.job
        order._without_folder(self.job, attempts, AWAY)
        return str(self.job.decision)


def test_it_counts_as_a_failed_start(monkeypatch: pytest.MonkeyPatch) -> None:
    outage = Outage(monkeypatch, ())
    assert outage.end() == "requeue" and outage.did == ["put back"]
    assert outage.job.watch.ledger.failures == (Failure(5, 0),)
    (event,) = outage.events
    assert isinstance(event, AttemptEnded) and (event.cause, event.decision) == (AWAY.text, "next")


@pytest.mark.parametrize(
    ("unended", "failures"),
    [((0, 0), ()), ((40, 40), ()), ((), (Failure(3, 0), Failure(4, 0))), ((0,), (Failure(3, 0),))],
)
def test_a_disk_that_fails_again_and_again_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, unended: tuple[int, ...], failures: tuple[Failure, ...]
) -> None:
    outage = Outage(monkeypatch, unended, failures)
    assert outage.end() == "failed" and outage.did == ["failed"] and outage.job.exit_code == 1


def test_starts_that_got_further_do_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Outage(monkeypatch, (30, 60, 90)).end() == "requeue"


def test_what_the_user_has_cancelled_stays_out(monkeypatch: pytest.MonkeyPatch) -> None:
    outage = Outage(monkeypatch, ())
    outage.job.stop_file = lambda: "cancelled by the user"
    assert outage.end() == "stopped" and outage.did == ["stopping"]


def test_one_that_is_ended_from_outside_has_told_it_already(monkeypatch: pytest.MonkeyPatch) -> None:
    outage = Outage(monkeypatch, ())
    outage.job.ending, outage.job.decision = "time limit", "requeue"
    outage.end()
    assert outage.did == []


def test_failures_that_cannot_be_written_count_all_the_same() -> None:
    """A full disk: the file still has what it had. Another one that the ranks have written counts, too."""
    answers = {"files": ["3 40\n", "40 100\n", ""]}
    told: list[tuple[str, ...]] = []
    folder = SimpleNamespace(known=lambda *_: answers["files"], tell=lambda *words: told.append(words))
    job: Any = SimpleNamespace(folder=folder, watch=SimpleNamespace(ledger=Ledger()), _own="")
    for attempt in (4, 5):
        before = supervisor.Job.ledger(job)
        supervisor.Job.keep(job, before, count_failure(Settings("/run", breaker=3), before, attempt, 0))
    after = supervisor.Job.ledger(job)
    assert after.failures == (Failure(3, 40), Failure(4, 40), Failure(5, 40)) and stuck(after.failures, 3) == 40
    assert [words for words in told if words[1] == "failures"] == [
        ("append", "failures", "4 40"),
        ("append", "failures", "5 40"),
    ]
    answers["files"] = ["3 40\n4 40\n5 40\n5 60\n", "60 100\n", ""]
    assert supervisor.Job.ledger(job).failures[-1] == Failure(5, 60)
