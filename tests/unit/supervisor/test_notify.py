"""The supervisor's alerts: nothing waits for them, and none is lost while a folder or a receiver is away."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from slurmddp.alerts.spool import deliver_all
from slurmddp.records.alert import Alert, read
from slurmddp.run.layout import RunFolder
from slurmddp.supervisor.deliver import Outcome, Settings, from_environment
from slurmddp.supervisor.notify import Notifier
from slurmddp.supervisor.post import ARRIVED, WAITS
from tests.receiver import Receiver

PAYLOAD = """on failed 4 has FAILED
on hang 4 hangs
leave node
escape json
header Content-Type: application/json
part {"key": "@key@", "cause": "@cause@", "step": @step:number@, "tail": "@log_tail@"}
"""
BOOM = Alert("failed", "failed", "boom", "nothing", attempt=0)


class Place(NamedTuple):
    """A run folder with one target, its addresses, and a folder on the node's own disk."""

    run: Path
    secrets: Path
    disk: Path
    other: Path  # a second one

    def notifier(self) -> Notifier:
        return Notifier(Settings(str(self.run), str(self.secrets), (str(self.disk), str(self.other)), "17", "node1"))

    def address(self, url: str) -> None:
        (self.secrets / "bot").write_text(f"{url}\n")

    def hang(self) -> Callable[[], None]:
        """Let the run folder hang, as a dead mount does: whoever reads there waits. Returns how to end it."""
        progress = self.run / "progress"
        progress.unlink()
        os.mkfifo(progress)

        def end() -> None:
            progress.unlink()
            progress.write_text("5 10")

        return end


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    here = Place(
        tmp_path / "gpt-1", tmp_path / "config/slurmddp/secrets/gpt-1", tmp_path / "disk", tmp_path / "other" / "disk"
    )
    (here.run / "payloads").mkdir(parents=True)
    (here.run / "payloads/bot").write_text(PAYLOAD)
    (here.run / "progress").write_text("4 10")
    here.secrets.mkdir(parents=True, mode=0o700)
    return here


def opened(place: Place) -> Notifier:
    """A notifier that has learnt the run's targets."""
    notifier = place.notifier()
    notifier.open()
    until(lambda: notifier.poll() or not notifier.descriptors())
    return notifier


def until(true: Callable[[], Any], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_nobody_waits_for_a_slow_receiver(place: Place) -> None:
    with Receiver("slow:1") as receiver:
        place.address(receiver.url)
        notifier = place.notifier()
        begin = time.monotonic()
        notifier.send(BOOM)
        assert notifier.poll() == [] and time.monotonic() - begin < 0.9
        outcomes: list[Outcome] = []
        until(lambda: outcomes.extend(notifier.poll()) or outcomes)
        assert [(one.target, one.sent.outcome, one.recorded) for one in outcomes] == [("bot", ARRIVED, True)]
        assert receiver.accepted[0].json() == {"key": "gpt-1.0.failed", "cause": "boom", "step": 4, "tail": ""}
    (line,) = (place.run / "events.jsonl").read_text().splitlines()
    event = {key: value for key, value in json.loads(line).items() if key != "time"}
    assert event == {
        "event": "alert", "attempt": 0, "job_id": "17", "node": "node1", "kind": "failed", "target": "bot",
        "delivered": True, "spooled": False,
    }  # fmt: skip


def test_the_end_of_the_job_does_not_wait_longer_than_it_says(place: Place) -> None:
    with Receiver("slow") as receiver:
        place.address(receiver.url)
        notifier = place.notifier()
        notifier.send(BOOM)
        receiver.wait(1)
        begin = time.monotonic()
        assert notifier.settle(0.5) == [] and time.monotonic() - begin < 2
        assert [path.name for path in (place.run / "alerts/spool").iterdir()] == [".gpt-1.0.failed.bot"]
        assert notifier.unstored() == [], "nothing is lost"
        os.kill(notifier._children[0].pid, signal.SIGKILL)


def test_an_alert_that_no_disk_has_is_known(place: Place) -> None:
    end = place.hang()
    notifier = place.notifier()
    notifier.send(BOOM)
    notifier.settle(0)
    assert [alert.cause for alert in notifier.unstored()] == ["boom"]
    os.kill(notifier._children[0].pid, signal.SIGKILL)
    end()


def test_a_process_that_cannot_be_made_is_tried_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with Receiver() as receiver:
        place.address(receiver.url)
        notifier = place.notifier()
        before = len(os.listdir("/proc/self/fd"))
        with monkeypatch.context() as patched:
            patched.setattr(os, "fork", full)
            notifier.send(BOOM)
            assert notifier.settle(0) == [] == notifier.descriptors()
            assert [alert.cause for alert in notifier.unstored()] == ["boom"]
            assert len(os.listdir("/proc/self/fd")) == before
        assert [one.sent.outcome for one in notifier.settle(20)] == [ARRIVED] and notifier.unstored() == []


def test_the_sender_takes_no_signals_and_holds_no_pipe_of_the_supervisor(place: Place) -> None:
    with Receiver("slow:2") as receiver:
        place.address(receiver.url)
        reader, writer = os.pipe()
        notifier = place.notifier()
        notifier.send(BOOM)
        receiver.wait(1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            os.kill(notifier._children[0].pid, number)
        os.close(writer)
        assert os.read(reader, 1) == b"", "the reader sees the end while the sender still runs"
        os.close(reader)
        assert [one.sent.outcome for one in notifier.settle(20)] == [ARRIVED]


def test_a_run_folder_that_was_purged(place: Place) -> None:
    with Receiver() as receiver:
        place.address(receiver.url)
        notifier = opened(place)
        shutil.rmtree(place.run)
        notifier.send(BOOM)
        (one,) = notifier.settle(20)
        assert (one.sent.outcome, one.recorded) == (ARRIVED, False)
        assert receiver.accepted[0].json()["cause"] == "boom" and not place.run.exists()


def test_a_run_folder_that_hangs(place: Place) -> None:
    """The message arrives; and if the receiver is down, too, it waits beside the addresses until a command sends it."""
    with Receiver("error") as receiver:
        place.address(receiver.url)
        notifier = opened(place)
        end = place.hang()
        notifier.send(BOOM, 6)
        (one,) = notifier.settle(20)
        assert (one.sent.outcome, one.spooled, one.recorded) == (WAITS, True, False)
        assert receiver.received and not (place.run / "alerts").exists()
        assert os.listdir(place.secrets / ".alerts/spool") == ["gpt-1.0.failed.bot"]
        end()
        receiver.mode = "ok"
        assert deliver_all([RunFolder(place.run)]) == (1, 0, "")
        assert receiver.accepted[0].json()["step"] is None
        assert deliver_all([RunFolder(place.run)]) == (0, 0, "")
        notifier.send(BOOM, 6)
        assert notifier.settle(20) == [] and len(receiver.accepted) == 1, "it has arrived"


def test_what_lies_on_the_nodes_disk_is_taken_up_by_the_next_job(place: Place) -> None:
    with Receiver("error") as receiver:
        place.address(receiver.url)
        notifier = opened(place)
        away = [folder.rename(folder.with_name(f"{folder.name}-away")) for folder in (place.run, place.secrets)]
        notifier.send(BOOM, 2)
        notifier.settle(20)
        assert os.listdir(place.disk / "gpt-1/spool") == ["gpt-1.0.failed.bot"]
        away[0].rename(place.run)
        away[1].rename(place.secrets)
        receiver.mode = "ok"
        opened(place)
        assert [request.json()["cause"] for request in receiver.accepted] == ["boom"]
        assert os.listdir(place.disk / "gpt-1/spool") == os.listdir(place.run / "alerts/spool") == []


def shared(disk: Path) -> None:
    disk.mkdir()
    disk.chmod(0o755)


def linked(disk: Path) -> None:
    (disk.parent / "theirs").mkdir(mode=0o700)
    disk.symlink_to("theirs")


def foreign(disk: Path) -> None:
    disk.mkdir(mode=0o700)
    os.chown(disk, 65534, -1)


def below_a_shared_one(disk: Path) -> None:
    disk.parent.chmod(0o777)


def below_a_foreign_one(disk: Path) -> None:
    os.chown(disk.parent, 65534, -1)


AS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="giving a folder to another user takes root")


@pytest.mark.parametrize(
    "prepare",
    [shared, linked, below_a_shared_one, *(pytest.param(one, marks=AS_ROOT) for one in (foreign, below_a_foreign_one))],
)
@pytest.mark.parametrize("second", [False, True], ids=["the only one", "with another"])
def test_a_disk_folder_that_others_may_read_or_replace_is_not_used(
    place: Place, prepare: Callable[[Path], None], second: bool
) -> None:
    """TMPDIR is the user's, and may lie anywhere: then /tmp is taken."""
    place = place._replace(disk=place.disk.parent / "tmp" / "disk")
    place.disk.parent.mkdir(mode=0o700)
    prepare(place.disk)
    if second:
        place.other.parent.mkdir(mode=0o700)
    (place.run / "alerts").write_text("no folder")
    place.secrets.rmdir()
    notifier = place.notifier()
    notifier.send(BOOM, 2)
    assert [one.spooled for one in notifier.settle(20)] == [second]
    found = [path for folder in (place.disk.parent, place.other.parent) for path in folder.rglob("head")]
    assert [path.is_relative_to(place.other) for path in found] == [True] * second


def test_where_alerts_wait_on_the_nodes_disk() -> None:
    name = f"slurmddp-alerts-{os.geteuid()}"
    assert from_environment("/run", {"TMPDIR": "/scratch/7"}).disks == (f"/scratch/7/{name}", f"/tmp/{name}")
    assert (
        from_environment("/run", {}).disks == from_environment("/run", {"TMPDIR": "/tmp/"}).disks == (f"/tmp/{name}",)
    )


def test_while_the_job_runs_what_waits_is_tried_again(place: Place) -> None:
    now = [1000.0]
    notifier = Notifier(Settings(str(place.run), str(place.secrets), (str(place.disk),)), lambda: now[0])
    with Receiver("status:503") as receiver:
        place.address(receiver.url)
        notifier.send(BOOM, 1)
        until(lambda: notifier.poll() or not notifier.descriptors())
        receiver.mode = "ok"
        now[0] += 100
        assert notifier.poll() == [] and not notifier.descriptors(), "not yet"
        now[0] += 100
        until(lambda: notifier.poll())
        assert len(receiver.accepted) == 1
        now[0] += 1000
        assert notifier.poll() == [] and not notifier.descriptors(), "nothing waits any more"


def test_an_alert_is_read_as_it_was_written() -> None:
    alert = Alert(
        "hang", "running", "boom", "", 3, "node2", "gpt-1", "/runs/gpt-1", "17", 2, 1700000000, 4, None, "", "x"
    )
    written = json.loads(json.dumps({**alert.write(), "site": "here", "job": "gpt", "command": "slurmddp status"}))
    assert read(written) == alert and written["key"] == "gpt-1.2.hang.1700000000" and written["log"] is None
    assert read({**written, "schema": 2}) is None and read({"schema": 1}) is None
