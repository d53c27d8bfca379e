"""The spool: sent by whoever comes next, once, by its owner only, and never in a command's way."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slurmddp.alerts.spool import deliver_all
from slurmddp.run.layout import RunFolder
from tests.programs.alerts.conftest import Alerts
from tests.receiver import Receiver


@pytest.fixture
def waiting(alerts_of: Any, monkeypatch: pytest.MonkeyPatch) -> Alerts:
    """A run with a message that waits, from a node that has no internet."""
    alerts: Alerts = alerts_of("{to: json}", "alerts: {from: login}")
    for name, value in alerts.desk.environment.items():
        monkeypatch.setenv(name, value)
    assert alerts.alert("failed", "FAILED", "rank 3 on node2: boom", "nothing") == ""
    return alerts


def test_nodes_without_internet_do_not_try(waiting: Alerts) -> None:
    with Receiver() as receiver:
        waiting.address(receiver.url)
        waiting.alert("finished")
        assert receiver.received == []
        done = deliver_all([waiting.run])
        assert (done.sent, done.left) == (2, 0)
        assert [request.json()["kind"] for request in receiver.received] == ["failed", "finished"]
        assert receiver.received[0].headers["idempotency-key"] == receiver.received[0].json()["key"]
        assert deliver_all([waiting.run]) == (0, 0, "")
    assert [event["delivered"] for event in waiting.events()] == [False, False, True, True]
    assert not waiting.waiting() and not list((waiting.run.path / "alerts/spool").iterdir())


@pytest.mark.parametrize("mode", ["slow", "error", "drop", "redirect"])
def test_what_still_does_not_go_stays(waiting: Alerts, mode: str) -> None:
    with Receiver(mode) as receiver:
        waiting.address(receiver.url)
        done = deliver_all([waiting.run], seconds=1)
        assert (done.sent, done.left) == (0, 1) and "SECRET" not in done.why
        assert [request.path for request in receiver.received] == ["/services/T0SECRET/B1SECRET"]
    assert len(waiting.waiting()) == 1


def test_a_refused_one_is_not_sent_for_ever(waiting: Alerts) -> None:
    with Receiver("status:404") as receiver:
        waiting.address(receiver.url)
        deliver_all([waiting.run])
        deliver_all([waiting.run])
        assert len(receiver.received) == 1
    assert len(waiting.waiting("refused")) == 1


def test_one_that_somebody_is_sending_is_left_alone_until_its_time_is_over(waiting: Alerts) -> None:
    (message,) = waiting.waiting()
    taken = message.rename(message.with_name(f".{message.name}"))
    with Receiver() as receiver:
        waiting.address(receiver.url)
        assert deliver_all([waiting.run]) == (0, 0, "")
        head = taken / "head"
        head.write_text(
            "\n".join(f"until {1}" if line.startswith("until") else line for line in head.read_text().splitlines())
        )
        assert deliver_all([waiting.run]).sent == 1
        assert len(receiver.received) == 1


def test_one_that_was_never_written_down_is_removed(waiting: Alerts) -> None:
    (message,) = waiting.waiting()
    half = message.with_name(f".{message.name}-half")
    half.mkdir()
    (half / "body").write_text("{")
    os.utime(half, (1, 1))
    with Receiver() as receiver:
        waiting.address(receiver.url)
        assert deliver_all([waiting.run]).sent == 1
        assert len(receiver.received) == 1
    assert not half.exists()


def test_a_message_from_a_run_of_an_older_version_is_sent(waiting: Alerts) -> None:
    """Its folder has a sender of its own, which wrote this form of the spool."""
    (message,) = waiting.waiting()
    key = f"{waiting.run.id}.4.finished"
    older = message.with_name(f"{key}.json")
    older.mkdir()
    (older / "body").write_text('{"kind": "finished"}')
    (older / "head").write_text(
        f"slurmddp-alert 1\ntarget json\nkey {key}\nkind finished\ninsecure 0\nuntil 1\n"
        f"header Idempotency-Key: {key}\nheader Content-Type: application/json\n"
    )
    with Receiver() as receiver:
        waiting.address(receiver.url)
        assert deliver_all([waiting.run]).sent == 2
        (request,) = [request for request in receiver.received if request.json()["kind"] == "finished"]
        assert request.headers["idempotency-key"] == key
        assert request.headers["content-type"] == "application/json"


def test_what_has_arrived_is_not_sent_again(waiting: Alerts) -> None:
    (waiting.run.path / "alerts/sent").write_text(f"{waiting.run.id}.0.failed json\n")
    with Receiver() as receiver:
        waiting.address(receiver.url)
        assert deliver_all([waiting.run]).sent == 1
        assert receiver.received == [] and not waiting.waiting()


SEND = "import sys; from pathlib import Path; from slurmddp.run.layout import RunFolder; from slurmddp.alerts.spool import deliver_all; deliver_all([RunFolder(Path(sys.argv[1]))], seconds=20)"  # noqa: E501


def test_several_at_once_send_each_message_once(waiting: Alerts) -> None:
    for number in range(6):
        waiting.alert("finished", SLURMDDP_ATTEMPT=str(number))
    with Receiver() as receiver:
        waiting.address(receiver.url)
        words = [sys.executable, "-c", SEND, str(waiting.run.path)]
        senders = [subprocess.Popen(words, env=waiting.desk.environment) for _ in range(3)]
        assert [sender.wait(60) for sender in senders] == [0, 0, 0]
        keys = [request.json()["key"] for request in receiver.received]
        assert len(keys) == 7 and len(set(keys)) == 7


def test_a_run_of_somebody_else_is_not_ours_to_send(waiting: Alerts, monkeypatch: pytest.MonkeyPatch) -> None:
    with Receiver() as receiver:
        waiting.address(receiver.url)
        monkeypatch.setattr(os, "geteuid", lambda: (waiting.run.path / "alerts/spool").stat().st_uid + 1)
        assert deliver_all([waiting.run]) == (0, 0, "")
        assert receiver.received == []


@pytest.mark.parametrize(
    "head",
    [
        "", "target ../../../etc/passwd\nkey k\nkind failed", "key k", "\xff\xfe",
        pytest.param("target json\n" * 100000, id="many lines"),  # pytest exports the id: too long for any program
        'target json\nkey k\nkind failed\nheader X: "\\nurl = x',
    ],
)  # fmt: skip
def test_a_damaged_message_harms_nobody(waiting: Alerts, head: str) -> None:
    (message,) = waiting.waiting()
    bad = Path(shutil.copytree(message, message.with_name("bad")))
    (bad / "head").write_text(head, encoding="latin-1")
    with Receiver() as receiver:
        waiting.address(receiver.url)
        deliver_all([waiting.run])
        assert [request.json()["kind"] for request in receiver.received if "failed" in request.body][:1] == ["failed"]
        assert {request.path for request in receiver.received} == {"/services/T0SECRET/B1SECRET"}


@pytest.mark.parametrize(
    "name", ["other-1.0.failed.json", "{run}0.failed.json", "{run}.0.failed", "{run}.x.failed.json"]
)
def test_a_message_whose_name_is_not_of_the_run_is_not_touched(waiting: Alerts, name: str) -> None:
    (message,) = waiting.waiting()
    other = message.rename(message.with_name(name.format(run=waiting.run.id)))
    with Receiver() as receiver:
        waiting.address(receiver.url)
        assert deliver_all([waiting.run]).sent == 0 and receiver.received == []
    assert sorted(path.name for path in other.iterdir()) == ["body", "head"]


def test_of_a_sent_message_only_its_own_files_go(waiting: Alerts) -> None:
    (message,) = waiting.waiting()
    (message / "kept").touch()
    with Receiver() as receiver:
        waiting.address(receiver.url)
        assert deliver_all([waiting.run]).sent == 1
    assert [path.name for path in (waiting.run.path / "alerts/spool").rglob("*") if path.is_file()] == ["kept"]


def test_nothing_to_send_is_no_trouble(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    runs = [RunFolder(tmp_path), RunFolder(tmp_path / "none"), RunFolder(tmp_path / "file")]
    assert deliver_all(runs)[:2] == (0, 0)
