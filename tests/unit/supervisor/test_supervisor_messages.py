"""What becomes of messages at the job's end."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slurmddp.records.alert import Alert
from slurmddp.supervisor.messages import Messages


def test_an_alert_that_no_disk_has_is_said_in_the_jobs_log(tmp_path: Path) -> None:
    said: list[str] = []
    folder: Any = SimpleNamespace(tell=lambda name, line: said.append(line))
    messages = Messages(folder, str(tmp_path), "7", "n1", {"HOME": str(tmp_path), "TMPDIR": str(tmp_path)})
    lost = Alert("failed", "failed", "rank 0: boom")
    messages._notifier = SimpleNamespace(settle=lambda seconds: [], unstored=lambda: [lost])  # type: ignore[assignment]
    messages.settle(0)
    (line,) = said
    assert line.endswith(" job.sh: alert failed: not sent, and no disk could store it: rank 0: boom")


def test_a_line_is_one_line(tmp_path: Path) -> None:
    said: list[str] = []
    folder: Any = SimpleNamespace(tell=lambda name, line: said.append(line))
    messages = Messages(folder, str(tmp_path), "7", "n1", {"HOME": str(tmp_path), "TMPDIR": str(tmp_path)})
    messages.say("node a\r\nb\u2028c\x85d: \x1b]0;x\x07\te\u202e" + "f" * 9999)
    (line,) = said
    assert line.endswith(" job.sh: node a b c d: ]0;x e" + "f" * 9999)
