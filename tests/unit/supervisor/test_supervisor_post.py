"""One message to one address: tries, pauses, refusals. The servers are real."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from slurmddp.records.alert import Message
from slurmddp.supervisor import post
from slurmddp.supervisor.post import ARRIVED, REFUSED, WAITS, Sent, deliver, once

MESSAGE = Message("bot", "r.0.failed", "failed", True, ("X-Id: 1",), b'a "b"\\\n\tc')


class Server:
    """Answers with these statuses, one after the other, the last one for ever."""

    def __init__(self, *statuses: int, **headers: str) -> None:
        self.bodies: list[bytes] = []
        self.headers: list[str | None] = []
        waiting = list(statuses)
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
                outer.headers.append(self.headers["X-Id"])
                self.send_response(waiting.pop(0) if len(waiting) > 1 else waiting[0])
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def opened() -> Iterator[list[Server]]:
    servers: list[Server] = []
    yield servers
    for server in servers:
        server.close()


def serve(opened: list[Server], *statuses: int, **headers: str) -> Server:
    opened.append(Server(*statuses, **headers))
    return opened[-1]


def test_a_message_arrives_as_it_is(opened: list[Server]) -> None:
    server = serve(opened, 204)
    sent = once(MESSAGE, server.url, 10)
    assert (sent.outcome, sent.status, sent.tries, sent.why) == (ARRIVED, "204", 1, "status 204")
    assert server.bodies == [MESSAGE.body] and server.headers == ["1"]


@pytest.mark.parametrize(
    ("status", "outcome"), [(200, ARRIVED), (400, REFUSED), (404, REFUSED), (408, WAITS), (429, WAITS), (503, WAITS)]
)
def test_what_an_answer_means(opened: list[Server], status: int, outcome: str) -> None:
    assert once(MESSAGE, serve(opened, status).url, 10).outcome == outcome


def test_it_is_tried_again_with_longer_pauses(opened: list[Server]) -> None:
    pauses: list[float] = []
    server = serve(opened, 503, 503, 503, 200)
    sent = deliver(MESSAGE, server.url, 60, rest=pauses.append)
    assert (sent.outcome, sent.tries, pauses) == (ARRIVED, 4, [1, 2, 4])


def test_a_server_may_ask_for_a_pause_and_a_refusal_or_redirect_is_final(opened: list[Server]) -> None:
    pauses: list[float] = []
    asks = serve(opened, 429, 429, 200, Retry_After="7")
    assert deliver(MESSAGE, asks.url, 60, rest=pauses.append).tries == 3 and pauses == [7, 7]
    for status, outcome in ((404, REFUSED), (302, WAITS)):
        sent = deliver(MESSAGE, serve(opened, status).url, 60, rest=pauses.append)
        assert (sent.outcome, sent.tries) == (outcome, 1)
    assert deliver(MESSAGE, asks.url, 0.0) == Sent(WAITS, why="no time left")
    soon = serve(opened, 429, Retry_After="50")
    assert deliver(MESSAGE, soon.url, 20, rest=pauses.append).tries == 1, "the pause is longer than the time"
    assert pauses == [7, 7]


def test_plain_http_only_where_it_was_asked_for() -> None:
    closed = MESSAGE._replace(insecure=False)
    assert once(closed, "http://example.invalid/x", 5) == Sent(REFUSED, why="its address is not https")


def test_nobody_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        sent = once(MESSAGE, f"http://127.0.0.1:{unused.getsockname()[1]}/s3cr3t-token", 5, secrets=["s3cr3t-token"])
    assert (sent.outcome, sent.status) == (WAITS, "000") and "s3cr3t" not in sent.why + sent.error
    monkeypatch.setenv("PATH", str(tmp_path))
    assert once(MESSAGE, "https://example.invalid", 5) == Sent(WAITS, why="curl is not installed on this host")


def test_a_curl_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "curl"
    fake.write_text(f"#!/bin/sh\nexec {shutil.which('sleep')} 60\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    began = time.monotonic()
    answer, error = post._run(["curl"], b"", 1)
    assert (answer, error) == (b"", b"") and time.monotonic() - began < 20
