"""Records of whole files: submission, manifest, alert and message, metrics: what is written is read back, and what is
not sound is refused or left out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slurmddp.records import alert, checkpoint, metrics, submission
from slurmddp.records.address import secret_parts
from slurmddp.records.alert import Alert, Message
from slurmddp.records.checkpoint import FileFacts, Manifest
from slurmddp.records.metrics import Metrics
from slurmddp.records.submission import Submission

SENT = Submission("123;c1", "slurm", ("sbatch", "job.sh"), "2026-01-02T03:04:05+00:00", "login1", "timed out")
SAVED = Manifest(7, 4, {"a.distcp": FileFacts(0, "ab")}, {"dp": 4, "pp": 1}, 2, "c0", "c1", "1.0", "2.11", 64)
TOLD = Alert("hang", "hanging", "no step", "restart", rank=0, node="n1", run="r", attempt=3, time=9, step=0, steps=20)


def test_a_submission() -> None:
    assert submission.read(json.loads(json.dumps(SENT.write()))) == SENT
    assert submission.read({**SENT.write(), "command": [], "host": None, "failed": None})[4:] == ("", "")
    made = submission.now("", "local", ["bash", "job.sh"])
    assert made.command == ("bash", "job.sh") and made.host and "T" in made.time
    with pytest.raises(ValueError, match="scheduler 'pbs' is none of"):
        submission.now("1", "pbs", [])


@pytest.mark.parametrize(
    ("change", "why"),
    [({"job_id": 123}, "job_id is missing"), ({"time": None}, "time is"), ({"command": "sbatch job.sh"}, "no list")],
)
def test_a_submission_that_is_none(change: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        submission.read({**SENT.write(), "command": [], **change})
    with pytest.raises(ValueError, match="no object"):
        submission.read([])


def test_a_manifest() -> None:
    assert checkpoint.read(SAVED.write()) == SAVED
    odd = checkpoint.read({**SAVED.write(), "mesh": {"dp": "4", "pp": 2}, "schema": None})
    assert odd.mesh == {"dp": 0, "pp": 2}
    assert checkpoint.read({"step": 0, "world": 0, "files": {}, "mesh": 3}) == Manifest(0, 0, {})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"schema": 2}, "has schema 2, and this version of slurmddp reads 1"),
        ({"files": {"a": {"bytes": 1}}}, "is not a manifest: KeyError"),
        ({"step": -1}, "whole numbers"),
        ({"world": True}, "whole numbers"),
        ({"files": {"a": {"bytes": 1, "sha256": None}}}, "lack hashes"),
        ({"files": {"/a": {"bytes": 1, "sha256": ""}}}, "not in the checkpoint's folder"),
        ({"files": {"b/../../a": {"bytes": 1, "sha256": ""}}}, "not in the checkpoint's folder"),
    ],
)
def test_a_manifest_that_is_none(change: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        checkpoint.read({**SAVED.write(), **change})


def test_an_alert() -> None:
    written = TOLD.write()
    assert alert.read(written) == TOLD and (written["folder"], written["log_tail"]) == (None, "")
    assert alert.read({**written, "schema": 0}) is None
    assert alert.read({**written, "run": None}) is None and alert.read({**written, "kind": 3}) is None
    assert alert.read({**written, "time": "9", "rank": "0", "node": 3}) == TOLD._replace(
        time=0, rank=None, node="", attempt=3
    )


def test_repeats_of_an_alert_have_one_key() -> None:
    assert TOLD._replace(kind="failed").key == TOLD._replace(kind="failed", time=99).key == "r.3.failed"
    assert TOLD._replace(kind="failed", attempt=None).key == "r.0.failed"
    asked, stopped = (TOLD._replace(kind="stopping", state=text).key for text in ("is asked: x", "stopped"))
    assert (asked, stopped) == ("r.3.stopping.is-asked-x", "r.3.stopping.stopped")


def test_a_message_that_waits() -> None:
    message = Message("bot", "r.0.failed", "failed", True, ("X-Id: 1",), b"body", 1700)
    assert alert.read_message(message.head(), b"body") == message and message.name == "r.0.failed.bot"
    unbound = message._replace(insecure=False, headers=(), until=0)
    assert alert.read_message(unbound.head(), b"body") == unbound
    assert alert.read_message(message.head().replace("key r.0.failed", "key ../x"), b"") is None
    assert alert.read_message(message.head().replace("X-Id: 1", "X-Id"), b"body") == message._replace(headers=())
    assert alert.read_message("", b"") is None


def test_no_part_of_an_address_may_be_told() -> None:
    token = "B1SECRETabcdefgh"
    parts = secret_parts([f"https://hooks.example.org/services/T0/{token}", "https://ntfy.sh/a topic".replace(" ", "")])
    assert token in parts and f"services/T0/{token}" in parts and "hooks.example.org" not in parts
    assert "atopic" in parts and "T0" not in parts and list(parts) == sorted(parts, key=len, reverse=True)
    assert "short" not in secret_parts(["https://ntfy.sh/short"]) and "1234567" in secret_parts(["https://h/1234567"])
    assert "x=1234567" not in secret_parts(["https://h/?x=12345"])


def test_a_line_of_metrics() -> None:
    line = Metrics(5, 100.0, 1, 90.0, {"data": 2.0, "compute": 7.5}, {"loss": 0.5})
    assert metrics.read(line.write()) == line and line.of_ranks
    assert metrics.read({"step": 5, "time": "x", "seconds": {"data": None, "sync": 1}, "mfu": 3}) == Metrics(
        5, seconds={"sync": 1.0}, figures={"mfu": 3}
    )
    assert metrics.read({"step": True}) is None and metrics.read({"loss": 1}) is None
    assert Metrics(5).write() == {"step": 5} and not Metrics(5, time=1.0).of_ranks


def test_seconds_are_running_totals_of_a_start() -> None:
    first, second = (Metrics(n, 90.0 + n, 0, 90.0, {"data": 1.0 * n, "compute": 3.0}) for n in (1, 4))
    assert second.since(first) == {"data": 3.0} and second.since(None) == {"data": 4.0, "compute": 3.0}
    again = second._replace(attempt=1)
    assert again.since(first) == again.seconds and not again.same_start(first) and second.same_start(first)


def test_figures_of_many_lines() -> None:
    line = {"step": 3, "loss": 0.5, "mfu": "x", "seconds": {"data": 1}}
    assert metrics.read_figures(line, ["loss", "mfu", "speed"]) == (3, [0.5, None, None])
    assert metrics.read_figures({"step": "3"}, ["loss"]) is None
