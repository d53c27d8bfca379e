"""What goes wrong on the way to a registry, and what a broken one answers: each is one clear message."""

import contextlib
import gzip
import json
import socket
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmddp.errors import ExternalError, SlurmddpError, UserError
from slurmddp.images.registry import documents
from slurmddp.images.registry.client import LARGEST, resolve
from slurmddp.images.registry.documents import digest_of
from slurmddp.images.registry.settings import RegistrySettings
from tests.registry_answers import Reply, Request, Server, closed_port, silent_port

CONFIG = json.dumps({"architecture": "amd64", "os": "linux"}).encode()
TYPE = "application/vnd.oci.image.config.v1+json"


def manifest(**more: object) -> bytes:
    config = {"mediaType": TYPE, "digest": digest_of(CONFIG), "size": len(CONFIG)}
    return json.dumps({"schemaVersion": 2, "config": config, "layers": [], **more}).encode()


def failure(reply: Reply, blob: Reply | None = None, tag: str = ":1") -> SlurmddpError:
    """What resolving an image comes to where the registry gives these answers about manifest and configuration."""

    def answer(request: Request) -> Reply:
        return (blob or Reply(200, CONFIG)) if "/blobs/" in request.path else reply

    with Server(answer) as server, pytest.raises(SlurmddpError) as error:
        resolve(f"{server.host}/lab/a{tag}", architecture="amd64")
    return error.value


def test_the_good_answers_that_the_others_are_changed_from() -> None:
    with Server(lambda request: Reply(200, CONFIG if "/blobs/" in request.path else manifest())) as server:
        assert resolve(f"{server.host}/lab/a", architecture="amd64").digest == digest_of(manifest())


@pytest.mark.parametrize(
    ("reply", "kind", "message"),
    [
        (Reply(401), UserError, "requires a login"),
        (Reply(403, b'{"errors": [{"code": "DENIED"}]}'), UserError, "(status 403), but no credentials"),
        (Reply(404, b'{"errors": [{"code": "NAME_UNKNOWN"}]}'), UserError, "has no image of this name"),
        (Reply(404, b'{"errors": [{"code": "MANIFEST_UNKNOWN"}]}'), UserError, "has no such tag"),
        (Reply(404, b"<html>"), UserError, "(status 404)\n  -> check name and tag, and that this host is a registry"),
        (Reply(429, b'{"errors": [{"code": "TOOMANYREQUESTS"}]}', {"Retry-After": "60"}), ExternalError,
         "limits the rate of requests and refuses the manifest of HOST/lab/a:1 (status 429, TOOMANYREQUESTS)\n"
         "  -> wait for 60 s and try again, log in"),
        (Reply(429, b"", {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}), ExternalError, "-> wait and try again"),
        (Reply(500), ExternalError, "failed to send the manifest of HOST/lab/a:1 (status 500)"),
        (Reply(503, b'{"errors": [{"code": "your PASSW0RD"}]}'), ExternalError, "(status 503)\n  -> try again later"),
        (Reply(418), ExternalError, "unexpected answer for the manifest of HOST/lab/a:1 (status 418)"),
        (Reply(200, b"<html>log in</html>"), ExternalError, "is not a JSON object\n  -> check that the host"),
        (Reply(200, b"[]"), ExternalError, "is not a JSON object"),
        (Reply(200, b"[" * 100000), ExternalError, "is not a JSON object"),
        (Reply(200, b"{}"), ExternalError, "sent an invalid"),
        (Reply(200, manifest(), {"Docker-Content-Digest": "sha256:" + "0" * 64}), ExternalError,
         "sent wrong data for the manifest of HOST/lab/a:1: the digest is sha256:"),
        (Reply(200, b"{", length=100), ExternalError, "does not answer as a registry does (IncompleteRead)"),
        (Reply(200, b" " * (LARGEST + 1)), ExternalError, "sent the manifest of HOST/lab/a:1 with more than 4 MiB"),
        (Reply(200, b'{"schemaVersion": 1, "fsLayers": []}'), UserError, "has Docker's old schema 1"),
        (Reply(200, manifest(manifests=[])), ExternalError, "sent an invalid"),
        (Reply(200, manifest(mediaType="application/vnd.oci.image.index.v1+json")), ExternalError,
         "sent an invalid"),
        (Reply(200, manifest(layers=[{"size": -1}])), ExternalError, "sent an invalid"),
        (Reply(200, manifest(layers=[1])), ExternalError, "sent an invalid"),
        (Reply(200, manifest(config={"mediaType": TYPE, "digest": "sha256:../..", "size": 1})), ExternalError,
         "sent an invalid"),
        (Reply(200, manifest(config={"mediaType": TYPE, "digest": digest_of(b""), "size": LARGEST + 1})), ExternalError,
         "the configuration of HOST/lab/a:1 has 4194305 bytes; the limit is 4 MiB"),
        (Reply(200, b'{"schemaVersion": 2, "manifests": []}'), UserError, "is not available for amd64; it has: none"),
        (Reply(200, b'{"schemaVersion": 2, "manifests": [{"digest": "../x"}]}'), ExternalError, "sent an invalid"),
        (Reply(302, b"", {"Location": "/again"}), ExternalError, "redirects more than 5 times"),
        (Reply(302, b"", {"Location": "file:///etc/passwd"}), ExternalError, "redirects to an invalid address"),
        (Reply(302, b"", {"Location": "http://evil.example/"}), UserError, "over plain HTTP, which is not allowed"),
    ],
)  # fmt: skip
def test_answers_about_the_manifest(reply: Reply, kind: type[SlurmddpError], message: str) -> None:
    error = failure(reply)
    assert type(error) is kind
    host = str(error).partition("127.0.0.1:")[2].split("/")[0].split()[0].rstrip(":,")
    assert message in str(error).replace(f"127.0.0.1:{host}", "HOST")
    assert "PASSW0RD" not in str(error)


@pytest.mark.parametrize(
    ("blob", "kind", "message"),
    [
        (Reply(404), ExternalError, "(status 404), though it lists it"),
        (Reply(429), ExternalError, "limits the rate of requests and refuses the configuration of"),
        (Reply(200, CONFIG + b" "), ExternalError, "sent wrong data for the configuration of"),
        (Reply(200, b" " * (LARGEST + 1)), ExternalError, "with more than 4 MiB"),
    ],
)
def test_answers_about_the_configuration(blob: Reply, kind: type[SlurmddpError], message: str) -> None:
    error = failure(Reply(200, manifest()), blob)
    assert type(error) is kind and message in str(error)


@pytest.mark.parametrize(
    "change",
    [
        {"architecture": None},
        {"architecture": "amd64\n"},
        {"config": {"Env": "A=b"}},
        {"config": {"Env": [1]}},
        {"config": {"Entrypoint": {}}},
        {"config": {"Entrypoint": ["/bin/sh\n%setup\ntouch /tmp/x"]}},
        {"config": {"Entrypoint": ["/bin/sh", "\x1b]52;c;eA==\x07"]}},
        {"config": {"WorkingDir": "/srv\n%setup"}},
        {"config": {"User": "root\u2028%setup"}},
    ],
)
def test_a_configuration_that_is_none(change: dict[str, object]) -> None:
    body = json.dumps({"architecture": "amd64", "os": "linux", **change}).encode()
    config = {"mediaType": TYPE, "digest": digest_of(body), "size": len(body)}
    error = failure(Reply(200, manifest(config=config)), Reply(200, body))
    assert type(error) is ExternalError and "the configuration of" in str(error)


def test_a_digest_is_held_against_the_bytes() -> None:
    error = failure(Reply(200, manifest()), tag="@sha256:" + "0" * 64)
    assert type(error) is ExternalError and "sent wrong data for the manifest" in str(error)


def test_an_index_of_indexes() -> None:
    inner = b'{"schemaVersion": 2, "manifests": []}'
    entry = {"digest": digest_of(inner), "platform": {"architecture": "amd64", "os": "linux"}}
    outer = json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode()
    server = Server(lambda request: Reply(200, inner if "sha256:" in request.path else outer))
    with server, pytest.raises(ExternalError, match="is an index of indexes"):
        resolve(f"{server.host}/lab/a", architecture="amd64")


def test_a_connection_that_was_closed_meanwhile_is_made_anew() -> None:
    """A server that closes each connection after its answer, without having said so."""

    class Closing(Server):
        def handle(self, handler, request):  # type: ignore[no-untyped-def]
            super().handle(handler, request)
            handler.close_connection = True

    with Closing(lambda request: Reply(200, CONFIG if "/blobs/" in request.path else manifest())) as server:
        assert resolve(f"{server.host}/lab/a", architecture="amd64").os == "linux"
        assert len(server.requests) == 2


def test_nobody_listens() -> None:
    with closed_port() as port:
        with pytest.raises(ExternalError) as error:
            resolve(f"127.0.0.1:{port}/lab/a")
        assert f"cannot reach 127.0.0.1:{port}: connection refused" in str(error.value)
        assert "export HTTPS_PROXY=http://HOST:PORT" in str(error.value)
        settings = RegistrySettings(proxy=f"http://u:S3CRET@127.0.0.1:{port}")
        with pytest.raises(ExternalError) as error:
            resolve("nvcr.io/lab/a", settings=settings)
        assert f"cannot reach the proxy 127.0.0.1:{port} for nvcr.io: connection refused" in str(error.value)
        assert "S3CRET" not in str(error.value)


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_nobody_answers(scheme: str) -> None:
    # Half of the time is for the connection. The rest has to do for loading certificates, on a busy machine, too.
    with silent_port() as port:
        settings = RegistrySettings(mirrors={"nvcr.io": f"{scheme}://127.0.0.1:{port}"}, timeout=4)
        with pytest.raises(ExternalError, match=rf"cannot reach 127.0.0.1:{port}: no answer within 2 s"):
            resolve("nvcr.io/lab/a", settings=settings)


_DRIPS = {
    "status": b"HTTP/1.1 200 " + b"O" * 9999,
    "header": b"HTTP/1.1 200 OK\r\nX-A: " + b"a" * 9999,
    "chunk size": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"0" * 9999,
    "chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffff\r\n" + b"{" * 9999,
    "trailer": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX-A: " + b"a" * 9999,
    "body": b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n" + b"{" * 9999,
    "handshake": b"\x16\x03\x03\x3f\xff\x02\x00\x3f\xfb\x03\x03" + b"a" * 9999,
}


@pytest.mark.parametrize("what", _DRIPS)
def test_a_registry_that_sends_byte_by_byte_has_one_deadline(what: str) -> None:
    """One of a byte's time-out would wait for ever: each byte comes in time."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def drip() -> None:
            connection, _ = listening.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(65536)
                connection.sendall(_DRIPS[what][:60])
                for byte in _DRIPS[what][60:]:
                    if over.wait(0.05):
                        return
                    connection.sendall(bytes([byte]))

        thread = threading.Thread(target=drip)
        thread.start()
        host = f"127.0.0.1:{listening.getsockname()[1]}"
        scheme = "https" if what == "handshake" else "http"
        settings = RegistrySettings(mirrors={"nvcr.io": f"{scheme}://{host}"}, timeout=1)
        begun = time.monotonic()
        try:
            with pytest.raises(ExternalError) as error:
                resolve("nvcr.io/lab/a", settings=settings)
        finally:
            over.set()
            thread.join()
        assert time.monotonic() - begun < 60, "each of its parts takes minutes"
    said = str(error.value)
    late = f"{host} took more than 1 s to answer about nvcr.io/lab/a:latest\n  -> try again later"
    assert late in said or (what == "handshake" and f"cannot reach {host}: no answer within 0.5 s" in said)
    assert RegistrySettings().timeout == 30


def test_redirects_share_the_deadline_of_the_first_request() -> None:
    """Each answer comes in time."""
    over = threading.Event()

    def slow(request: Request) -> Reply:
        over.wait(0.4)
        return Reply(302, b"", {"Location": "/again"})

    with Server(slow) as server:
        settings = RegistrySettings(timeout=1)
        with pytest.raises(ExternalError, match=rf"{server.host} took more than 1 s to answer about {server.host}/lab"):
            resolve(f"{server.host}/lab/a", settings=settings)
        over.set()


def test_a_chunks_length_without_an_end_is_not_read_into_memory() -> None:
    sent = 0
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def speak() -> None:
            nonlocal sent
            connection, _ = listening.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                while sent < 1 << 28:
                    sent += connection.send(b"0" * 65536)

        thread = threading.Thread(target=speak)
        thread.start()
        host = f"127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(ExternalError, match=r"does not answer as a registry does"):
            resolve(f"{host}/lab/a", architecture="amd64")
        thread.join()
    assert sent < 1 << 25, "what a socket's buffers hold, and no more"


def test_a_packed_answer_is_not_unpacked() -> None:
    packed = Reply(200, gzip.compress(manifest()), {"Content-Encoding": "gzip"})
    assert "is not a JSON object" in str(failure(packed))


def test_a_host_that_is_not_known() -> None:
    too_long = "h" * 64 + ".example"  # no name server could be asked
    for host in ("registry.invalid", too_long):
        with pytest.raises(ExternalError, match=rf"cannot reach {host}: unknown host {host}\n  -> check its"):
            resolve(f"{host}/lab/a")
    with pytest.raises(ExternalError, match=r"the proxy p.invalid:1 for a.io: unknown host p.invalid"):
        resolve("a.io/lab/a", settings=RegistrySettings(proxy="http://p.invalid:1"))


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ("http", "HOST does not answer as a registry does (BadStatusLine)\n  -> check host and port"),
        ("https", "no TLS connection with HOST: WRONG_VERSION_NUMBER\n  -> if it uses plain HTTP, add it"),
    ],
)
def test_what_listens_is_no_registry(scheme: str, message: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def speak() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")

        thread = threading.Thread(target=speak)
        thread.start()
        host = f"127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(ExternalError) as error:
            resolve("nvcr.io/lab/a", settings=RegistrySettings(mirrors={"nvcr.io": f"{scheme}://{host}"}))
        thread.join()
    said = str(error.value).replace(host, "HOST")
    assert said.startswith(message) or (scheme == "https" and said.startswith("no TLS connection with HOST: "))


_SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.just("sha256:" + "0" * 64)
_KEYS = [
    "config",
    "layers",
    "manifests",
    "digest",
    "size",
    "mediaType",
    "platform",
    "architecture",
    "os",
    "schemaVersion",
]
_JSON = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(_KEYS), inner, max_size=5),
    max_leaves=12,
)


@settings(max_examples=60)
@given(st.dictionaries(st.sampled_from(_KEYS), _JSON, max_size=6))
def test_no_manifest_breaks_it(tree: dict[str, object]) -> None:
    try:
        document = documents.Document(tree, "h", "the manifest")
        if documents.is_index(document, "", "i"):
            documents.choose(document, "amd64", "i")
        else:
            assert documents.read_manifest(document, "i").layers_size >= 0
    except SlurmddpError as error:
        assert str(error)
