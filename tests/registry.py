"""A real registry for tests: Debian's docker-registry on a free loopback port, and pushing images to it.

    with Registry.started(tmp_path) as registry:
        pushed = registry.push("lab/torch", "1.0", {"config": {"Env": ["A=b"]}}, [Path("layer.tar.gz")])
        registry.reference("lab/torch", "1.0")      127.0.0.1:PORT/lab/torch:1.0

Where docker-registry is missing, `started` skips the test, and fails it with SLURMDDP_REQUIRE_CLUSTER=1.
Standard library only, but for pytest's skip.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import gzip
import hashlib
import http.client
import io
import json
import os
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import pytest

Kind = Literal["oci", "docker"]
Layer = Path | bytes
PROGRAM = "docker-registry"
_START = 30.0
_CHUNK = 1 << 20

_TYPES: dict[Kind, dict[str, str]] = {
    "oci": {
        "index": "application/vnd.oci.image.index.v1+json",
        "manifest": "application/vnd.oci.image.manifest.v1+json",
        "config": "application/vnd.oci.image.config.v1+json",
        "tar": "application/vnd.oci.image.layer.v1.tar",
        "gzip": "application/vnd.oci.image.layer.v1.tar+gzip",
    },
    "docker": {
        "index": "application/vnd.docker.distribution.manifest.list.v2+json",
        "manifest": "application/vnd.docker.distribution.manifest.v2+json",
        "config": "application/vnd.docker.container.image.v1+json",
        "tar": "application/vnd.docker.image.rootfs.diff.tar",
        "gzip": "application/vnd.docker.image.rootfs.diff.tar.gzip",
    },
}


@dataclass(frozen=True)
class Pushed:
    """A manifest or index that is in the registry: its digest, bytes and media type; `config` is its blob's digest."""

    digest: str
    size: int
    media_type: str
    architecture: str | None = None
    config: str | None = None

    @property
    def descriptor(self) -> dict[str, Any]:
        return {"mediaType": self.media_type, "digest": self.digest, "size": self.size}


class Registry:
    """A running registry; `host` is HOST:PORT as references write it, `log` what it has said so far."""

    def __init__(
        self, host: str, users: Mapping[str, str] | None, certificate: Path | None, log: Path, storage: Path
    ) -> None:
        self.host = host
        self.log = log
        self.storage = storage
        self._user = next(iter(users.items())) if users else None
        self._certificate = certificate

    @classmethod
    @contextlib.contextmanager
    def started(
        cls,
        folder: Path,
        *,
        users: Mapping[str, str] | None = None,
        tls: tuple[Path, Path] | None = None,
        token: Mapping[str, str] | None = None,
        host: str = "127.0.0.1",
    ) -> Iterator[Registry]:
        """Start one that keeps all that it has below `folder`, and end it; started there again, it still has it.

        users: name -> password, who alone may read and write.
        tls:   files of a certificate and its key; it speaks HTTPS then.
        token: realm, service, issuer and rootcertbundle of a token service (then `push` cannot be used).
        """
        require()
        folder = Path(folder) / "registry"
        storage = folder / "storage"
        storage.mkdir(parents=True, exist_ok=True)
        configuration = _configuration(folder, users, tls, token, host)
        (folder / "config.yml").write_text(json.dumps(configuration))  # JSON is YAML
        # REGISTRY_... variables would change its configuration, and proxies are none of its business
        environment = {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "HOME": str(folder)}
        child = subprocess.Popen(
            [PROGRAM, "serve", folder / "config.yml"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
            cwd=folder,
        )
        log = folder / "log"
        address = _Address(child, log)
        try:
            port = address.port()
            shown = f"[{host}]" if ":" in host else host
            yield cls(f"{shown}:{port}", users, tls[0] if tls else None, log, storage)
        finally:
            child.kill()
            child.wait()
            address.join()

    def reference(self, name: str, tag: str = "latest") -> str:
        """As users write it, without docker://; `tag` may be a digest."""
        return f"{self.host}/{name}{'@' if tag.startswith('sha256:') else ':'}{tag}"

    def push(
        self,
        name: str,
        tag: str | None,
        config: Mapping[str, Any],
        layers: Sequence[Layer] = (),
        *,
        kind: Kind = "oci",
        config_type: str | None = None,
    ) -> Pushed:
        """Push one image; layers are tar archives, gzipped or not, and files are streamed.

        config: the image's configuration; architecture (amd64), os (linux) and rootfs are filled in where missing.
        tag:    None: it can be named by its digest only, as the images of an index are.
        """
        types = _TYPES[kind]
        described, unpacked = [], []
        for layer in layers:
            digest, size = self.push_blob(name, layer)
            packed, inner = _unpacked(layer)
            described.append({"mediaType": types["gzip" if packed else "tar"], "digest": digest, "size": size})
            unpacked.append(inner)
        whole = {"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": unpacked}, **config}
        digest, size = self.push_blob(name, json.dumps(whole).encode())
        manifest = {
            "schemaVersion": 2,
            "mediaType": types["manifest"],
            "config": {"mediaType": config_type or types["config"], "digest": digest, "size": size},
            "layers": described,
        }
        pushed = self.push_manifest(name, tag, json.dumps(manifest).encode(), types["manifest"])
        return Pushed(pushed.digest, pushed.size, pushed.media_type, whole["architecture"], digest)

    def push_index(self, name: str, tag: str, images: Sequence[Pushed], *, kind: Kind = "oci") -> Pushed:
        """Push an index of images that are pushed already, each for its architecture (None: an attestation)."""
        manifests = [
            {
                **image.descriptor,
                "platform": {
                    "architecture": image.architecture or "unknown",
                    "os": "linux" if image.architecture else "unknown",
                },
            }
            for image in images
        ]
        media_type = _TYPES[kind]["index"]
        index = {"schemaVersion": 2, "mediaType": media_type, "manifests": manifests}
        return self.push_manifest(name, tag, json.dumps(index).encode(), media_type)

    def push_manifest(self, name: str, tag: str | None, body: bytes, media_type: str) -> Pushed:
        """Push these very bytes as a manifest or index."""
        digest = "sha256:" + hashlib.sha256(body).hexdigest()
        self._request("PUT", f"/v2/{name}/manifests/{tag or digest}", body, {"Content-Type": media_type}, expect=201)
        return Pushed(digest, len(body), media_type)

    def push_blob(self, name: str, content: Layer) -> tuple[str, int]:
        """Push a file or bytes; digest and size."""
        with _opened(content) as file:
            digest = _digest(file)
            size = file.tell()
        headers = self._request("POST", f"/v2/{name}/blobs/uploads/", b"", expect=202)
        place = headers["Location"]
        place = place[place.index("/v2/") :] + ("&" if "?" in place else "?") + f"digest={digest}"
        with _opened(content) as file:
            more = {"Content-Type": "application/octet-stream", "Content-Length": str(size)}
            self._request("PUT", place, file, more, expect=201)
        return digest, size

    def delete_manifest(self, name: str, digest: str) -> None:
        """Remove an image and the tags that name it."""
        self._request("DELETE", f"/v2/{name}/manifests/{digest}", b"", expect=202)

    def _request(
        self,
        method: str,
        path: str,
        body: bytes | BinaryIO,
        headers: Mapping[str, str] | None = None,
        *,
        expect: int,
    ) -> http.client.HTTPMessage:
        everything = dict(headers or {})
        if self._user:
            everything["Authorization"] = "Basic " + base64.b64encode(":".join(self._user).encode()).decode()
        if self._certificate:
            context = ssl.create_default_context(cafile=str(self._certificate))
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                self.host, timeout=60, context=context, blocksize=_CHUNK
            )
        else:
            connection = http.client.HTTPConnection(self.host, timeout=60, blocksize=_CHUNK)
        try:
            connection.request(method, path, body, everything)
            response = connection.getresponse()
            said = response.read()
        finally:
            connection.close()
        if response.status != expect:
            raise RuntimeError(f"{method} {path}: status {response.status}, not {expect}: {said[:500]!r}")
        return response.headers


def require() -> None:
    """Skip the test where docker-registry is missing; fail it where everything has to be there."""
    if shutil.which(PROGRAM):
        return
    reason = f"{PROGRAM} is not installed (Debian package docker-registry)"
    print(reason)
    if os.environ.get("SLURMDDP_REQUIRE_CLUSTER") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


class _Address:
    """Copies what the registry says into its log, and finds there on which port it listens."""

    def __init__(self, child: subprocess.Popen[bytes], log: Path) -> None:
        self._child = child
        self._log = log
        self._port: int | None = None
        self._known = threading.Event()
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def port(self) -> int:
        if not self._known.wait(_START) or self._port is None:
            raise RuntimeError(f"{PROGRAM} did not start: {self._log.read_text()[-2000:]}")
        return self._port

    def join(self) -> None:
        self._thread.join()

    def _copy(self) -> None:
        assert self._child.stderr is not None
        with self._log.open("wb", buffering=0) as file, self._child.stderr:
            for line in self._child.stderr:
                file.write(line)
                if self._port is None and b"listening on " in line:
                    said = json.loads(line)["msg"]  # listening on 127.0.0.1:40000[, tls]
                    self._port = int(said.removesuffix(", tls").rpartition(":")[2])
                    self._known.set()
        self._known.set()


def _configuration(
    folder: Path,
    users: Mapping[str, str] | None,
    tls: tuple[Path, Path] | None,
    token: Mapping[str, str] | None,
    host: str,
) -> dict[str, Any]:
    http_part: dict[str, Any] = {"addr": f"{f'[{host}]' if ':' in host else host}:0", "secret": "of-a-test"}
    if tls:
        http_part["tls"] = {"certificate": str(tls[0]), "key": str(tls[1])}
    configuration: dict[str, Any] = {
        "version": 0.1,
        "log": {"level": "info", "formatter": "json"},
        "storage": {"filesystem": {"rootdirectory": str(folder / "storage")}, "delete": {"enabled": True}},
        "http": http_part,
    }
    if users:
        names = "".join(f"{name}:{bcrypt(password)}\n" for name, password in users.items())
        (folder / "htpasswd").write_text(names)
        configuration["auth"] = {"htpasswd": {"realm": "a test", "path": str(folder / "htpasswd")}}
    elif token:
        configuration["auth"] = {"token": dict(token)}
    return configuration


def bcrypt(password: str) -> str:
    """As an htpasswd file wants it; libcrypt is in every Debian, Python's crypt is not in every Python."""
    library = ctypes.CDLL("libcrypt.so.1")
    library.crypt.restype = ctypes.c_char_p
    salt = base64.b64encode(os.urandom(16), altchars=b"./").rstrip(b"=")[:21] + b"u"
    found: bytes | None = library.crypt(password.encode(), b"$2b$04$" + salt)
    if not found or not found.startswith(b"$2b$"):
        raise RuntimeError("this libcrypt has no bcrypt")
    return found.decode("ascii")


@contextlib.contextmanager
def _opened(content: Layer) -> Iterator[BinaryIO]:
    with content.open("rb") if isinstance(content, Path) else io.BytesIO(content) as file:
        yield file


def _unpacked(layer: Layer) -> tuple[bool, str]:
    """Whether it is gzipped, and the digest of the tar archive itself."""
    with _opened(layer) as file:
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        return packed, _digest(gzip.GzipFile(fileobj=file) if packed else file)


def _digest(file: BinaryIO | gzip.GzipFile) -> str:
    found = hashlib.sha256()
    while chunk := file.read(_CHUNK):
        found.update(chunk)
    return "sha256:" + found.hexdigest()
