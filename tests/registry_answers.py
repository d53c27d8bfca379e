"""Real HTTP servers for tests of the registry client: one that answers what it is told, a proxy, a token service.

All listen on loopback and record what they were sent.
"""

from __future__ import annotations

import base64
import contextlib
import json
import select
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit


@dataclass(frozen=True)
class Request:
    """One request; header names in lower case; `peer`: the port from which its connection comes."""

    method: str
    path: str
    headers: Mapping[str, str]
    peer: int

    @property
    def query(self) -> dict[str, str]:
        return {key: values[0] for key, values in parse_qs(urlsplit(self.path).query).items()}


@dataclass(frozen=True)
class Reply:
    """`length`: announced instead of the body's own."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    length: int | None = None


class Server:
    """Calls `answer` for each request until it is closed."""

    def __init__(self, answer: Callable[[Request], Reply], tls: ssl.SSLContext | None = None) -> None:
        self.requests: list[Request] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                headers = {name.lower(): value for name, value in self.headers.items()}
                request = Request(self.command, self.path, headers, self.client_address[1])
                server.requests.append(request)
                server.handle(self, request)

            do_CONNECT = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                """Silent: the requests are recorded."""

        self.answer = answer
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        if tls:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self.port = int(self._server.server_address[1])
        self.host = f"127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def handle(self, handler: BaseHTTPRequestHandler, request: Request) -> None:
        reply = self.answer(request)
        with contextlib.suppress(OSError):  # the other side may have had enough
            handler.send_response(reply.status)
            for name, value in reply.headers.items():
                handler.send_header(name, value)
            handler.send_header("Content-Length", str(len(reply.body) if reply.length is None else reply.length))
            handler.end_headers()
            handler.wfile.write(reply.body)
        if reply.length is not None:
            handler.close_connection = True

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Proxy(Server):
    """A forward proxy to which every name is the one server behind it; `userinfo`: "name:password" that it wants."""

    def __init__(self, behind: int, userinfo: str | None = None) -> None:
        super().__init__(self._forward)
        self._behind = behind
        self._wanted = "Basic " + base64.b64encode(userinfo.encode()).decode() if userinfo else None

    def handle(self, handler: BaseHTTPRequestHandler, request: Request) -> None:
        if self._wanted and request.headers.get("proxy-authorization") != self._wanted:
            handler.send_error(407)
        elif request.method == "CONNECT":
            self._tunnel(handler)
        else:
            super().handle(handler, request)

    def _forward(self, request: Request) -> Reply:
        parts = urlsplit(request.path)
        connection = HTTPConnection("127.0.0.1", self._behind, timeout=20)
        headers = {name: value for name, value in request.headers.items() if not name.startswith("proxy-")}
        connection.request("GET", f"{parts.path}?{parts.query}" if parts.query else parts.path, headers=headers)
        response = connection.getresponse()
        body = response.read()
        connection.close()
        kept = ("Content-Type", "Docker-Content-Digest", "WWW-Authenticate", "Location")
        found = {name: response.headers[name] for name in kept if name in response.headers}
        return Reply(response.status, body, found)

    def _tunnel(self, handler: BaseHTTPRequestHandler) -> None:
        # The client breaks off where it does not trust the certificate
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._behind)) as onward:
            handler.send_response(200)
            handler.end_headers()
            ends = {handler.connection: onward, onward: handler.connection}
            while True:
                for one in select.select(list(ends), [], [])[0]:
                    data = one.recv(65536)
                    if not data:
                        handler.close_connection = True
                        return
                    ends[one].sendall(data)


@dataclass(frozen=True)
class Certificate:
    """A self-signed certificate and its key, both PEM."""

    certificate: Path
    key: Path

    @classmethod
    def made(cls, folder: Path, *names: str) -> Certificate:
        """For these names, "DNS:..." or "IP:..."."""
        key, certificate = folder / "key.pem", folder / "certificate.pem"
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days",
             "2", "-keyout", key, "-out", certificate, "-subj", "/CN=test",
             "-addext", "subjectAltName=" + ",".join(names or ("DNS:test",))],
            check=True, capture_output=True,
        )  # fmt: skip
        return cls(certificate, key)

    def context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self.key)
        return context


class TokenService(Server):
    """Hands out tokens that a registry takes (auth: token): JWTs signed by the certificate's key.

    users: name -> password; who is none of them gets a token that allows nothing, unless the image is public.
    """

    def __init__(self, folder: Path, users: Mapping[str, str], public: frozenset[str] = frozenset()) -> None:
        super().__init__(self._give)
        self._certificate = Certificate.made(folder)
        self._folder = folder
        self._public = public
        self._known = {
            "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode(): name
            for name, password in users.items()
        }

    @property
    def configuration(self) -> dict[str, str]:
        """The registry's `auth: token` part."""
        return {
            "realm": f"http://{self.host}/token",
            "service": "the test's registry",
            "issuer": "the test",
            "rootcertbundle": str(self._certificate.certificate),
        }

    def _give(self, request: Request) -> Reply:
        shown = request.headers.get("authorization")
        if shown is not None and shown not in self._known:
            return Reply(401, b"{}")
        kind, name, actions = request.query["scope"].split(":")
        allowed = actions.split(",") if shown or name in self._public else []
        return Reply(200, json.dumps({"token": self._signed(kind, name, allowed)}).encode())

    def _signed(self, kind: str, name: str, actions: list[str]) -> str:
        pem = self._certificate.certificate.read_text()
        chain = ["".join(pem.split("-----")[2].split())]
        now = int(time.time())
        claims = {
            "iss": "the test",
            "sub": "",
            "aud": "the test's registry",
            "exp": now + 300,
            "nbf": now - 60,
            "iat": now,
            "jti": "1",
            "access": [{"type": kind, "name": name, "actions": actions}],
        }
        text = b".".join(
            _coded(json.dumps(part).encode()) for part in ({"typ": "JWT", "alg": "ES256", "x5c": chain}, claims)
        )
        signed = subprocess.run(
            ["openssl", "dgst", "-sha256", "-sign", self._certificate.key], input=text, capture_output=True, check=True
        )
        return b".".join([text, _coded(_raw(signed.stdout))]).decode("ascii")


def _coded(part: bytes) -> bytes:
    return base64.urlsafe_b64encode(part).rstrip(b"=")


def _raw(signature: bytes) -> bytes:
    """An ECDSA signature as JWTs have it, two numbers of 32 bytes, of the DER that openssl writes."""
    numbers, place = [], 2
    for _ in range(2):
        length = signature[place + 1]
        numbers.append(int.from_bytes(signature[place + 2 : place + 2 + length], "big").to_bytes(32, "big"))
        place += 2 + length
    return b"".join(numbers)


@contextlib.contextmanager
def silent_port() -> Iterator[int]:
    """A port that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@contextlib.contextmanager
def closed_port() -> Iterator[int]:
    """A port at which nothing listens, kept from others."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]
