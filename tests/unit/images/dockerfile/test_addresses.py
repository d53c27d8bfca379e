"""ADD of an address, from a real HTTP server."""

import hashlib
import http.server
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmddp.errors import ExternalError, UserError
from slurmddp.images.context.download import downloaded
from slurmddp.images.image_spec import of_dockerfile
from slurmddp.images.inputs import inputs_of
from slurmddp.images.registry.settings import RegistrySettings

from .conftest import Dock, cut

BODY = b"\x1f\x8b no archive is unpacked" * 5000
SUM = hashlib.sha256(BODY).hexdigest()


class _Handler(http.server.BaseHTTPRequestHandler):
    asked: list[str] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self.path == "/moved/x.bin":
            self.send_response(302)
            self.send_header("Location", "/files/x.bin?v=1")
            self.end_headers()
            return
        found = self.path.startswith("/files/")
        self.send_response(200 if found else 404)
        self.send_header("Content-Length", str(len(BODY)))
        self.send_header("Last-Modified", "Sun, 09 Sep 2001 01:46:40 GMT")
        self.end_headers()
        self.wfile.write(BODY)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    _Handler.asked.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_an_address_is_fetched_once_and_is_as_docker_has_it(dock: Dock, server: str, tmp_path: Path) -> None:
    dock.file("local", "L")
    made = dock.convert(
        f"FROM debian:12\nADD {server}/moved/x.bin {server}/files/a%20b.tgz?x=1 local @/to/\n"
        f"ADD {server}/moved/x.bin @/as\n"
        f"ADD --checksum=sha256:{SUM} --chmod=644 {server}/files/y @/new/y\n".replace("a%20b", "a%2Bb")
    )
    assert any("has mode 600" in note for note in made.notes) and len(made.sources) == 1
    said: list[str] = []
    with downloaded(made.items, tmp_path, RegistrySettings(), said.append) as (items, facts):
        dock.items = items
        (part,) = cut(made.definition)
        done = dock.post(part)
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(dock.root / "to")) == ["a+b.tgz", "local", "x.bin"]
    assert (dock.root / "to/a+b.tgz").read_bytes() == BODY == (dock.root / "as").read_bytes()
    state = (dock.root / "as").stat()
    assert stat.S_IMODE(state.st_mode) == 0o600 and state.st_mtime == 1e9
    assert stat.S_IMODE((dock.root / "new/y").stat().st_mode) == 0o644
    assert facts == dict.fromkeys((f"{server}/moved/x.bin", f"{server}/files/a%2Bb.tgz?x=1", f"{server}/files/y"), SUM)
    assert _Handler.asked.count("/moved/x.bin") == 1 and len(said) == 3
    assert not list(tmp_path.glob("slurmddp-*"))


def test_what_is_not_there_or_has_changed(dock: Dock, server: str, tmp_path: Path) -> None:
    made = dock.convert(f"FROM debian:12\nADD --checksum=sha256:{'0' * 64} {server}/files/x /x\n")
    settings = RegistrySettings()
    with pytest.raises(UserError) as caught, downloaded(made.items, tmp_path, settings, print):
        pass
    assert f"has the checksum sha256:{SUM}, not sha256:000" in caught.value.what
    assert caught.value.where == f"{dock.context}/Dockerfile:2"
    made = dock.convert(f"FROM debian:12\nADD {server}/none /x\n")
    with pytest.raises(ExternalError, match=r"no file at .*/none \(status 404\)"):
        downloaded(made.items, tmp_path, settings, print).__enter__()
    made = dock.convert("FROM debian:12\nADD http://lab.example/x /x\n")
    with pytest.raises(UserError, match="plain HTTP"):
        downloaded(made.items, tmp_path, settings, print).__enter__()


def test_another_address_or_checksum_is_another_image(dock: Dock) -> None:
    keys = set()
    for line in (
        "https://lab.example/1/x",
        "https://lab.example/2/x",
        f"--checksum=sha256:{SUM} https://lab.example/1/x",
    ):
        keys.add(inputs_of(of_dockerfile(dock.file("Dockerfile", f"FROM debian:12\nADD {line} /x\n"), {}, None)).key)
    assert len(keys) == 3


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("COPY https://lab.example/x /x", "COPY cannot download"),
        ("ADD https://lab.example/x.git#main /x", "not the URL of a file"),
        ("ADD git@lab.example:x /x", "not the URL of a file"),
        ("ADD ftp://lab.example/x /x", "not the URL of a file"),
        ("ADD https://lab.example/ /x/", "does not end in a file name"),
        ("ADD https://lab.example/%2e%2e /x/", "does not end in a file name"),
        ("ADD https://lab.example/a%0a%25setup /x/", "does not end in a file name"),
        ("ADD https://me:word@lab.example/x /x", "contains a password"),
        ("ADD --checksum=md5:1 https://lab.example/x /x", "not a SHA-256"),
        ("ADD --checksum=sha256:1 file /x", "--checksum works for one URL only"),
    ],
)
def test_addresses_that_are_refused(dock: Dock, line: str, what: str) -> None:
    dock.file("file")
    with pytest.raises(UserError, match=what):
        dock.convert(f"FROM debian:12\n{line}\n")
