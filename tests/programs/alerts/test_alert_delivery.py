"""The sender and real servers: each message once where all goes well, at least once elsewhere, and never in the way."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest

from slurmddp.alerts.spool import deliver_all
from tests.programs.alerts.conftest import TARGETS, Alerts
from tests.receiver import Receiver

JSON = "{to: json}"


@pytest.fixture
def one(alerts_of: Any) -> Alerts:
    """A single target, so that requests are easily counted."""
    alerts: Alerts = alerts_of(JSON)
    return alerts


def test_every_target_gets_one_message_with_the_same_key(alerts_of: Any) -> None:
    alerts = alerts_of()
    with Receiver() as receiver:
        alerts.address(receiver.url)
        assert alerts.alert("failed", "FAILED", "boom", "nothing") == ""
        assert alerts.alert("failed", "NODE_FAIL", "another word for the same end", "nothing") == ""
        assert len(receiver.received) == len(TARGETS) and not alerts.waiting()
        assert {request.headers["idempotency-key"] for request in receiver.received} == {f"{alerts.run.id}.0.failed"}
        assert {event["target"]: event["delivered"] for event in alerts.events()} == dict.fromkeys(TARGETS, True)
        (note,) = [request for request in receiver.received if "x-sequence-id" in request.headers]
        assert note.headers["title"] == "gpt has FAILED" and note.headers["priority"] == "4"


def test_each_target_hears_of_what_it_asked_for(alerts_of: Any) -> None:
    alerts = alerts_of(
        "{to: json, name: all, on: [started, failed]}, {to: json, name: few, on: [failed]}, {to: slack, on: []}"
    )
    with Receiver() as receiver:
        alerts.address(receiver.url)
        for kind in ("started", "requeued", "failed"):
            alerts.alert(kind)
        kinds = [request.json()["kind"] for request in receiver.received]
        assert sorted(kinds) == ["failed", "failed", "started"]


def test_a_hang_may_be_told_of_twice(one: Alerts) -> None:
    with Receiver() as receiver:
        one.address(receiver.url)
        one.alert("hang", "RUNNING", "rank 1 on node1: hang")
        key = receiver.received[0].json()["key"]
        assert key.startswith(f"{one.run.id}.0.hang.") and key.rsplit(".", 1)[1].isdigit()


def test_it_tries_again_with_the_same_message(one: Alerts) -> None:
    with Receiver("error:2") as receiver:
        one.address(receiver.url)
        assert one.alert("failed", budget=20) == ""
        assert [request.answer for request in receiver.received] == [500, 500, 200]
        assert len({request.body for request in receiver.received}) == 1
        assert not one.waiting()


def test_the_server_says_when(one: Alerts) -> None:
    with Receiver("retry:1:3") as receiver:
        one.address(receiver.url)
        assert one.alert("failed", budget=20) == ""
        first, second = receiver.received
        assert second.answer == 200 and second.time - first.time >= 3


@pytest.mark.parametrize("mode", ["error", "drop", "slow", "redirect", "retry:99:50"])
def test_what_does_not_arrive_in_time_waits_and_arrives_later(
    one: Alerts, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in one.desk.environment.items():
        monkeypatch.setenv(name, value)
    with Receiver(mode) as receiver:
        one.address(receiver.url)
        said = one.alert("failed", "FAILED", "boom", budget=2)
        assert "target json" in said and "SECRET" not in said
        (waiting,) = one.waiting()
        assert (receiver.received and not receiver.accepted) or mode == "slow"
        if mode in ("redirect", "slow"):  # nobody else gets it; and who takes it slowly does not get it twice at once
            assert [request.path for request in receiver.received] == ["/services/T0SECRET/B1SECRET"]
        assert (one.events()[0]["delivered"], one.events()[0]["spooled"]) == (False, True)
        body = (waiting / "body").read_text()
        receiver.mode = "ok"
        assert deliver_all([one.run]).sent == 1
        assert receiver.received[-1].body == body and receiver.received[-1].answer == 200
        assert receiver.received[-1].headers["idempotency-key"] == f"{one.run.id}.0.failed"
        assert not one.waiting()
        one.alert("failed", "FAILED", "boom", budget=2)
        assert receiver.received[-1].body == body, "what has arrived later has arrived"
        assert len(receiver.accepted) == (2 if mode == "slow" else 1)


def test_a_dead_server(one: Alerts) -> None:
    with Receiver() as receiver:
        url = receiver.url
    one.address(url)
    assert "status 000" in one.alert("failed", budget=2)
    assert len(one.waiting()) == 1


def test_a_slow_server_does_not_hold_up_the_others(alerts_of: Any) -> None:
    alerts = alerts_of("{to: json, name: slow}, {to: json, name: quick}")
    with Receiver("slow") as slow, Receiver() as quick:
        alerts.address(slow.url, "slow")
        alerts.address(quick.url, "quick")
        child = alerts.start("failed", budget=4)
        slow.wait(1)
        quick.wait(1)
        assert child.poll() is None
    child.communicate(timeout=60)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410, 413])
def test_a_refusal_is_no_reason_to_ask_again(one: Alerts, status: int) -> None:
    with Receiver(f"status:{status}") as receiver:
        one.address(receiver.url)
        assert f"status {status}" in one.alert("failed")
        assert len(receiver.received) == 1
        assert not one.waiting() and len(one.waiting("refused")) == 1


def test_a_full_disk_stops_no_message(one: Alerts) -> None:
    (one.run.path / "alerts").write_text("a file where the folder should be: nothing can be written there\n")
    with Receiver() as receiver:
        one.address(receiver.url)
        one.alert("failed", TMPDIR=str(one.desk.bin))
        assert receiver.received[0].json()["kind"] == "failed"
        assert list(one.desk.bin.iterdir()) == []


def test_without_an_address_or_curl_it_waits(one: Alerts) -> None:
    assert "address" in one.alert("failed")
    assert len(one.waiting()) == 1
    one.address("http://127.0.0.1:1/x")
    (one.secrets / "json").write_text("https://exa mple.com/\nurl = file:///etc/passwd\n")
    assert "address" in one.alert("finished")
    assert len(one.waiting()) == 2


def test_what_is_not_encrypted_leaves_this_host_only_if_asked(alerts_of: Any) -> None:
    alerts = alerts_of(
        "{to: json, name: plain}, {to: json, name: asked, insecure: true}",
        "alerts: {from: proxy, proxy: 'http://PROXY'}",
    )
    with Receiver() as proxy:
        for payload in (alerts.run.path / "payloads").iterdir():
            payload.write_text(payload.read_text().replace("http://PROXY", f"http://127.0.0.1:{proxy.port}"))
        alerts.address("http://hooks.example.com/x/SECRET16CHARACTERS")
        said = alerts.alert("failed")
        assert "plain: its address is not https" in said
        # It went by the proxy, which nothing but the profile names.
        assert [request.path for request in proxy.received] == ["http://hooks.example.com/x/SECRET16CHARACTERS"]
        assert [path.name.rsplit(".", 1)[1] for path in alerts.waiting("refused")] == ["plain"]


def test_the_certificate_must_be_one_that_this_host_trusts(one: Alerts, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-keyout", key, "-out", certificate, "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with Receiver(tls=context) as receiver:
        one.address(receiver.url.replace("127.0.0.1", "localhost"))
        assert "status 000" in one.alert("failed", budget=5)
        assert not receiver.received and len(one.waiting()) == 1
        assert one.alert("finished", CURL_CA_BUNDLE=str(certificate)) == ""
        assert [request.json()["kind"] for request in receiver.received] == ["finished"]


def test_a_users_own_curlrc_changes_nothing(one: Alerts) -> None:
    (one.desk.home / ".curlrc").write_text('location\noutput = "/dev/stdout"\nverbose\n')
    with Receiver("redirect") as receiver:
        one.address(receiver.url)
        one.alert("failed")
        assert [request.path for request in receiver.received] == ["/services/T0SECRET/B1SECRET"]


def family(pid: int) -> list[int]:
    """A process and all that came from it: other tests, which may run at the same time, have the same address."""
    try:
        children = [
            each for task in Path(f"/proc/{pid}/task").iterdir() for each in (task / "children").read_text().split()
        ]
    except OSError:
        return []
    return [pid, *(each for child in children for each in family(int(child)))]


def test_the_address_is_on_no_command_line_and_in_no_environment(one: Alerts) -> None:
    with Receiver("slow") as receiver:
        one.address(receiver.url)
        child = one.start("failed", "FAILED", "boom", budget=4)
        receiver.wait(1)
        seen, found = [], []
        for process in [Path(f"/proc/{pid}") for pid in family(child.pid)]:
            for part in ("cmdline", "environ"):
                try:
                    text = (process / part).read_bytes()
                except OSError:
                    continue
                seen += [process] if b"--config" in text else []
                found += [process / part] if b"B1SECRET" in text else []
        assert seen and not found, "curl is running, and shows nothing"
        for path in [path for path in one.run.path.rglob("*") if path.is_file()]:
            assert b"B1SECRET" not in path.read_bytes(), path
    child.communicate(timeout=60)
