"""`alert test`, `alert watch`, and the commands that send what waits on their way."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurmddp.alerts import sample, secrets
from slurmddp.job.alerts import KINDS
from slurmddp.run import manifest
from slurmddp.run.layout import RunFolder
from tests.helpers import Desk, Result
from tests.programs.alerts.conftest import Alerts
from tests.receiver import Receiver

SOME = ("slack", "json")
Cli = Callable[..., Result]


def job(desk: Desk, targets: str, site: str = "here") -> str:
    desk.write("train.py")
    desk.write("job.yaml", f"name: gpt\nsite: {site}\ntrain: {{script: train.py}}\nalerts: [{targets}]\n")
    return "job.yaml"


def test_a_sample_of_each_kind_goes_to_each_target(desk: Desk, cli: Cli) -> None:
    entries = ", ".join(f"{{to: {to}, url_env: HOOK, on: [{', '.join(KINDS)}]}}" for to in SOME)
    with Receiver() as receiver:
        done = cli("alert", "test", job(desk, entries), HOOK=receiver.url)
        assert done.code == 0, done
        assert len(receiver.received) == len(KINDS) * len(SOME)
        found = [request.json() for request in receiver.received if b"schema" in request.body.encode()[:20]]
        assert sorted(message["kind"] for message in found) == sorted(KINDS)
        assert all("a test" in message["cause"] and message["node"] == "node1" for message in found)
    assert done.out.count("arrived  status 200") == len(KINDS) * len(SOME)
    assert list((desk.config / "secrets").iterdir()) == []
    assert not (desk.project / "runs").exists()


def test_what_does_not_arrive_is_told(desk: Desk, cli: Cli) -> None:
    entries = "{to: json, name: good, url_env: A, on: [failed]}, {to: json, name: bad, url_env: B, on: [failed, hang]}"
    with Receiver() as good, Receiver("status:404") as bad:
        done = cli("alert", "test", job(desk, entries), A=good.url, B=bad.url)
    assert done.code == 1
    rows = [line.split(None, 2) for line in done.out.splitlines()]
    told = {(kind, name): rest for kind, name, rest in rows}
    assert told["failed", "good"].startswith("arrived") and told["failed", "bad"].startswith("FAILED   status 404")
    assert told["hang", "good"] == told["started", "bad"] == "skipped (not in `on`)"
    assert "SECRET" not in done.out + done.err


def test_a_receiver_that_is_not_there_is_told_with_curls_reason(
    desk: Desk, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample, "_BUDGET", 5)  # seconds
    with socket.socket() as nobody:  # bound, and not listening: the port stays free
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}/SECRET-SECRET-SECRET"
        done = cli("alert", "test", job(desk, "{to: json, name: gone, url_env: HOOK, on: [failed]}"), HOOK=url)
    assert done.code == 1 and "FAILED   no answer (curl: (7)" in done.out
    assert "SECRET" not in done.out + done.err


def test_a_dry_run_says_which_address_is_missing(desk: Desk, cli: Cli) -> None:
    done = cli("submit", job(desk, "{to: slack}, {to: json, url_env: HOOK}"), "--dry-run", HOOK="https://x.org/y")
    assert done.code == 2
    assert "alerts/slack: the file with the address of alert target slack does not exist" in done.err
    assert "target json" not in done.err


@pytest.mark.parametrize(
    "site", ["alerts: {from: login}", pytest.param("internet_on_nodes: false", marks=pytest.mark.long)]
)
def test_a_test_goes_out_from_here_where_nodes_cannot(desk: Desk, cli: Cli, site: str) -> None:
    desk.site(f"name: shut\ntitle: t\nbases: [here]\n{site}\n")
    with Receiver() as receiver:
        done = cli("alert", "test", job(desk, "{to: json, url_env: HOOK, on: [failed]}", "shut"), HOOK=receiver.url)
        assert done.code == 0 and len(receiver.received) == 1


def test_a_test_without_a_target_or_an_address_is_a_mistake(desk: Desk, cli: Cli) -> None:
    assert cli("alert", "test", job(desk, "")).code == 2
    done = cli("alert", "test", job(desk, "{to: slack}"))
    assert done.code == 2 and "alerts/slack" in done.err


@pytest.fixture
def waiting(alerts_of: Any) -> Alerts:
    """A run that `slurmddp` finds, with a message that its node could not send."""
    alerts: Alerts = alerts_of("{to: json}", "alerts: {from: login}")
    run = alerts.run
    (run.path / "job.sh").write_text("")
    facts = manifest.build(
        run, name="gpt", command=[], project=None, code_hash="", image=None, resumed_from=[], more={}
    )
    manifest.write(run, facts)
    alerts.alert("failed", "FAILED", "boom")
    return alerts


@pytest.mark.parametrize("command", ["status", "logs"])
def test_the_next_command_sends_what_waits(waiting: Alerts, cli: Cli, command: str) -> None:
    with Receiver() as receiver:
        waiting.address(receiver.url)
        done = cli(command, str(waiting.run.path))
        assert "sent 1 delayed alert" in done.err and len(receiver.received) == 1
        assert "delayed" not in cli(command, str(waiting.run.path)).err
        assert len(receiver.received) == 1


def test_runs_sends_what_waits(waiting: Alerts, cli: Cli) -> None:
    state = waiting.desk.home / ".local/state/slurmddp"
    state.mkdir(parents=True)
    entry = {
        "id": waiting.run.id,
        "path": str(waiting.run.path),
        "created": "",
        "name": "gpt",
        "site": "",
        "job_id": "",
    }
    (state / "runs.jsonl").write_text(json.dumps(entry) + "\n")
    with Receiver() as receiver:
        waiting.address(receiver.url)
        assert cli("runs").code == 0 and len(receiver.received) == 1


def test_watch_alerts_once(waiting: Alerts, cli: Cli) -> None:
    path = str(waiting.run.path)
    with Receiver("error") as receiver:
        waiting.address(receiver.url)
        done = cli("alert", "watch", "--once", path)
        assert done.code == 1 and "status 500" in done.err
        receiver.mode = "ok"
        done = cli("alert", "watch", "--once", path)
        assert (done.code, done.out) == (0, "alerts sent: 1\n")
        assert cli("alert", "watch", "--once", path).err == "no alerts to send\n"


def test_a_message_without_its_address_is_told_of_and_stays(waiting: Alerts, cli: Cli) -> None:
    done = cli("alert", "watch", "--once", str(waiting.run.path))
    kept = secrets.of_run(waiting.run.id, waiting.desk.environment)
    assert done.code == 1 and str(kept) in done.err
    assert len(waiting.waiting()) == 1
    assert cli("status", str(waiting.run.path)).code == 1, "and harms no other command"


def test_a_run_that_is_not_ours_is_only_read(waiting: Alerts, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    with Receiver() as receiver:
        waiting.address(receiver.url)
        monkeypatch.setattr(os, "geteuid", lambda: Path(waiting.run.path).stat().st_uid + 1)
        cli("status", str(waiting.run.path))
        assert receiver.received == [] and RunFolder(waiting.run.path).exists
