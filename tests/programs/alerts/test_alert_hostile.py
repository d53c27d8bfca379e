"""What the receiver of an alert may answer: it gets one message, and nothing of the sender's time, memory or files."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from slurmddp.alerts.spool import deliver_all
from tests.programs.alerts.conftest import Alerts

ESCAPES = b"\x1b]52;c;cm0gLXJmIH4=\x07\x1b[2J\xe2\x80\xae"
ONCE = {
    "to a file": b"HTTP/1.1 307 x\r\nLocation: file:///etc/passwd\r\nContent-Length: 0\r\n\r\n",
    "to the metadata": b"HTTP/1.1 302 x\r\nLocation: http://169.254.169.254/latest/\r\nContent-Length: 0\r\n\r\n",
    "pause": b"HTTP/1.1 429 x\r\nRetry-After: 1000000000\r\nContent-Length: 0\r\n\r\n",
    "pause of no number": b"HTTP/1.1 429 x\r\nRetry-After: $(touch x)\r\nContent-Length: 0\r\n\r\n",
    "negative pause": b"HTTP/1.1 503 x\r\nRetry-After: -1\r\nContent-Length: 0\r\n\r\n",
    "escapes": b"HTTP/1.1 500 " + ESCAPES + b"\r\nX: " + ESCAPES + b"\r\nContent-Length: 7\r\n\r\n" + ESCAPES[:7],
    "no protocol": ESCAPES * 100,
    "a status of four digits": b"HTTP/1.1 2000 x\r\n\r\n",
    "a bomb": b"HTTP/1.1 500 x\r\nContent-Encoding: gzip\r\nContent-Length: 9\r\n\r\n\x1f\x8b\x08\0\0\0\0\0\0",
}
#: KiB for each process of the sender: the answer of a fast server does not fit.
MEMORY = 400_000
FOR_EVER = {
    "headers": (b"HTTP/1.1 500 x\r\n", b"X-Header: " + b"x" * 4000 + b"\r\n"),
    "informational answers": (b"", b"HTTP/1.1 103 x\r\nX: " + b"x" * 60000 + b"\r\n\r\n"),
    "one header": (b"HTTP/1.1 500 x\r\nX: ", b"x" * 65536),
    "body": (b"HTTP/1.1 500 x\r\n\r\n", b"x" * 65536),
    "drips": (b"HTTP/1.1 500 x\r\nX: ", b""),
}


@contextlib.contextmanager
def answering(answer: Callable[[socket.socket, threading.Event], None]) -> Iterator[tuple[str, list[bytes]]]:
    """A server that reads a request and gives this answer. Its address, and the first line of each request."""
    seen: list[bytes] = []
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def one(connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                seen.append(connection.recv(65536).split(b"\r\n")[0])
                answer(connection, over)

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=one, args=(server.accept()[0],), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/services/T0SECRET/B1SECRET", seen
        over.set()


@pytest.fixture
def one(alerts_of: Any, monkeypatch: pytest.MonkeyPatch) -> Alerts:
    alerts: Alerts = alerts_of("{to: json}")
    for name, value in alerts.desk.environment.items():
        monkeypatch.setenv(name, value)
    return alerts


def check(one: Alerts, said: str, before: set[str]) -> None:
    """The message waits, nothing of the answer is shown or kept, and nothing else is new."""
    assert one.waiting() and not set(said) & {"\x1b", "\x07", "\u202e"} and "SECRET" not in said, said
    for name in ("head", "body"):
        assert b"\x1b" not in (one.waiting()[0] / name).read_bytes()
    assert [json.loads(line)["delivered"] for line in one.run.events.read_text().splitlines()] == [False]
    assert {path.name for path in one.run.path.iterdir()} - before <= {"alerts", "events.jsonl"}
    assert {path.name for path in one.waiting()[0].iterdir()} == {"head", "body"}


def kinds(known: dict[str, Any], short: set[str]) -> list[Any]:
    """All of them, those that are not `short` in the long tests."""
    return [pytest.param(kind, marks=() if kind in short else pytest.mark.long) for kind in known]


@pytest.mark.parametrize("kind", kinds(ONCE, {"to the metadata", "escapes"}))
def test_an_answer(one: Alerts, kind: str) -> None:
    before = {path.name for path in one.run.path.iterdir()}
    with answering(lambda connection, over: connection.sendall(ONCE[kind])) as (url, seen):
        one.address(url)
        check(one, one.alert("failed", "FAILED", "boom", budget=3), before)
        why = deliver_all([one.run]).why
        assert "\x1b" not in why and "SECRET" not in why
        assert set(seen) == {b"POST /services/T0SECRET/B1SECRET HTTP/1.1"}
    assert one.waiting()


@pytest.mark.parametrize("kind", kinds(FOR_EVER, {"informational answers"}))
def test_an_answer_without_end_takes_the_time_of_one_try_and_no_memory(one: Alerts, kind: str) -> None:
    first, then = FOR_EVER[kind]

    def answer(connection: socket.socket, over: threading.Event) -> None:
        connection.sendall(first)
        while not over.is_set():
            connection.sendall(then or b"x")
            if not then:
                over.wait(0.05)

    before = {path.name for path in one.run.path.iterdir()}
    with answering(answer) as (url, _):
        one.address(url)
        one.memory = MEMORY
        check(one, one.alert("failed", "FAILED", "boom", budget=5), before)
        assert deliver_all([one.run]).sent == 0
    assert one.waiting()


def test_headers_without_end_for_a_curl_without_a_limit(one: Alerts) -> None:
    """Those before 8.3 have none (CVE-2023-38039)."""
    one.address("http://127.0.0.1:9/services/T0SECRET/B1SECRET")
    one.desk.program("curl", "#!/bin/bash\nhead -c 450000000 /dev/zero | tr '\\0' x\nprintf '\\n500\\n'\n")
    one.memory = MEMORY
    before = {path.name for path in one.run.path.iterdir()}
    said = one.alert("failed", "FAILED", "boom", budget=60)  # that many bytes take some seconds, on a busy machine 20
    assert "status 500" in said
    check(one, said, before)
