"""A receiver of alerts: a real HTTP server that records what it gets and misbehaves on demand.

In a test:            with Receiver() as receiver: ... receiver.url ... receiver.wait(1)
On a cluster's host:  python3 tests/receiver.py FOLDER [--port N] [--host ADDRESS] [--mode MODE]
                      (FOLDER/port is written when it listens, FOLDER/requests.jsonl as requests come;
                      FOLDER/mode, where it exists, is read before each answer; see `recorded`)

Modes: ok, slow (answers after 60 s), slow:SECONDS, error (500), error:N (500 to the first N, then 200), status:CODE,
retry:N:SECONDS (429 with Retry-After to the first N), redirect (307 to /elsewhere), drop (closes without an answer).
Standard library only: hosts of the test cluster run it with their own Python.
"""

from __future__ import annotations

import argparse
import json
import ssl
import threading
import time
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

SLOW = 60.0


@dataclass(frozen=True)
class Received:
    """One request. `body`: as text (bytes that are no UTF-8 as surrogates); `answer`: its status, 0 none."""

    time: float
    method: str
    path: str
    headers: dict[str, str]
    body: str
    answer: int

    def json(self) -> Any:
        """The body as JSON, by a parser that takes strict UTF-8 and no control characters."""
        return json.loads(self.body.encode("utf-8", "surrogateescape").decode("utf-8"))


class Receiver:
    """Listens on a free port of `host` until it is closed; `mode` may be changed at any time."""

    def __init__(
        self,
        mode: str = "ok",
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        folder: Path | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.mode = mode
        self.folder = folder
        self._received: list[Received] = []
        self._changed = threading.Condition()
        self._closing = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver._handle(self)

            do_GET = do_PUT = do_POST

            def log_message(self, format: str, *args: Any) -> None:
                """Silent: the requests are recorded."""

        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        self._scheme = "https" if tls else "http"
        if tls:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self.host, self.port = host, int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    @property
    def url(self) -> str:
        """An address as a webhook's: with a secret in its path."""
        return f"{self._scheme}://{self.host}:{self.port}/services/T0SECRET/B1SECRET"

    def start(self) -> Receiver:
        self._thread.start()
        if self.folder:
            partial = self.folder / ".port"
            partial.write_text(str(self.port))
            partial.rename(self.folder / "port")
        return self

    def close(self) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Receiver:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def received(self) -> list[Received]:
        """All requests so far, in the order in which their answers were decided."""
        with self._changed:
            return list(self._received)

    @property
    def accepted(self) -> list[Received]:
        """Those that were answered with 200."""
        return [request for request in self.received if request.answer == 200]

    def wait(self, count: int, timeout: float = 20) -> list[Received]:
        """All requests, once there are `count`. Raises TimeoutError with what has come."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._received) >= count, timeout):
                raise TimeoutError(f"{len(self._received)} of {count} requests in {timeout} s: {self._received}")
            return list(self._received)

    def _handle(self, handler: BaseHTTPRequestHandler) -> None:
        length = int(handler.headers.get("Content-Length") or 0)
        body = handler.rfile.read(length).decode("utf-8", "surrogateescape")
        headers = {name.lower(): value for name, value in handler.headers.items()}
        with self._changed:
            answer, more, delay = self._decide(self._mode())
            request = Received(time.time(), handler.command, handler.path, headers, body, answer)
            self._received.append(request)
            if self.folder:
                with (self.folder / "requests.jsonl").open("a", encoding="ascii") as file:
                    file.write(json.dumps(asdict(request)) + "\n")
            self._changed.notify_all()
        if delay and self._closing.wait(delay):
            answer = 0
        if answer == 0:
            handler.close_connection = True
            return
        try:
            handler.send_response(answer)
            for name, value in more.items():
                handler.send_header(name, value)
            handler.send_header("Content-Length", "2")
            handler.end_headers()
            handler.wfile.write(b"ok")
        except OSError:
            return  # the sender has given up

    def _mode(self) -> str:
        try:
            return (self.folder / "mode").read_text().strip() if self.folder else self.mode
        except FileNotFoundError:
            return self.mode

    def _decide(self, mode: str) -> tuple[int, dict[str, str], float]:
        """Status (0: none), further headers, and seconds until the answer."""
        kind, _, rest = mode.partition(":")
        before = len(self._received)
        if kind == "ok":
            return 200, {}, 0.0
        if kind == "slow":
            return 200, {}, float(rest or SLOW)
        if kind == "error":
            return (500 if not rest or before < int(rest) else 200), {}, 0.0
        if kind == "status":
            return int(rest), {}, 0.0
        if kind == "retry":
            count, _, seconds = rest.partition(":")
            return (429, {"Retry-After": seconds}, 0.0) if before < int(count) else (200, {}, 0.0)
        if kind == "redirect":
            return 307, {"Location": f"http://{self.host}:{self.port}/elsewhere"}, 0.0
        if kind == "drop":
            return 0, {}, 0.0
        raise ValueError(f"no mode {mode!r}")


def recorded(folder: Path) -> list[Received]:
    """The requests that a receiver with this folder has had so far; a line that is being written is left out."""
    try:
        text = (folder / "requests.jsonl").read_text(encoding="ascii")
    except FileNotFoundError:
        return []
    return [Received(**json.loads(line)) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--mode", default="ok")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    receiver = Receiver(options.mode, host=options.host, port=options.port, folder=options.folder)
    receiver.start()._thread.join()


if __name__ == "__main__":
    main()
