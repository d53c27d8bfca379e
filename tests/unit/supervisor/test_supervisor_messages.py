"""What becomes of messages at the job's end."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slurmddp.records.alert import Alert
from slurmddp.records.cause import Cause
from slurmddp.records.job_events import JobStarted
from slurmddp.supervisor.messages import Messages


def test_an_alert_that_no_disk_has_is_said_in_the_jobs_log(tmp_path: Path) -> None:
    said: list[str] = []
    folder: Any = SimpleNamespace(confirm=lambda: None, tell=lambda name, line: said.append(line))
    messages = Messages(folder, str(tmp_path), "7", "n1", {"HOME": str(tmp_path), "TMPDIR": str(tmp_path)})
    lost = Alert("failed", "failed", "rank 0: boom")
    messages._notifier = SimpleNamespace(settle=lambda seconds: [], unstored=lambda: [lost])  # type: ignore[assignment]
    messages.settle(0)
    (line,) = said
    assert line.endswith(" job.sh: alert failed: not sent, and no disk could store it: rank 0: boom")


def test_a_line_is_one_line(tmp_path: Path) -> None:
    said: list[str] = []
    folder: Any = SimpleNamespace(confirm=lambda: None, tell=lambda name, line: said.append(line))
    messages = Messages(folder, str(tmp_path), "7", "n1", {"HOME": str(tmp_path), "TMPDIR": str(tmp_path)})
    messages.say("node a\r\nb\u2028c\x85d: \x1b]0;x\x07\te\u202e" + "f" * 9999)
    (line,) = said
    assert line.endswith(" job.sh: node a b c d: ]0;x e" + "f" * 9999)


def test_what_has_become_of_an_alert_is_an_event_unless_its_sender_wrote_it(tmp_path: Path) -> None:
    told: list[tuple[str, ...]] = []
    folder: Any = SimpleNamespace(confirm=lambda: None, tell=lambda *words: told.append(words))
    messages = Messages(folder, str(tmp_path), "7", "n1", {"HOME": str(tmp_path), "TMPDIR": str(tmp_path)})
    outcomes = [
        SimpleNamespace(recorded=done, event=lambda done=done: JobStarted(f"recorded {done}", None, 0))
        for done in (True, False)
    ]
    messages._notifier = SimpleNamespace(poll=lambda: outcomes)  # type: ignore[assignment]
    messages.poll()
    ((name, file, line),) = told
    assert (
        (name, file) == ("append", "events.jsonl")
        and '"event": "job_started"' in line
        and '"job_id": "7"' in line
        and "recorded False" in line
    )


def test_an_alert_says_the_cause_or_its_own_text(tmp_path: Path) -> None:
    sent: list[tuple[Alert, float]] = []
    folder: Any = SimpleNamespace(confirm=lambda: None, tell=lambda *_: None)
    messages = Messages(folder, str(tmp_path), "7", "n1", {"HOME": str(tmp_path), "TMPDIR": str(tmp_path)})
    messages._notifier = SimpleNamespace(send=lambda alert, budget: sent.append((alert, budget)))  # type: ignore
    messages.attempt, messages.budget = 3, 8
    messages.alert("failed", "failed", Cause("boom", 1, "n2"), "restart")
    messages.alert("failed", "failed", Cause("boom", 1, "n2"), "restart", "in short")
    messages.alert("started", "running", None, "")
    (first, budget), (second, _), (third, _) = sent
    assert (first.cause, first.rank, first.node, first.attempt, budget) == ("rank 1 on n2: boom", 1, "n2", 3, 8)
    assert second.cause == "in short" and (third.cause, third.rank, third.node) == ("", None, "")
