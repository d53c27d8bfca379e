"""Reads manifests, indexes and configurations: OCI image-spec 1.1 and Docker's image manifest version 2, schema 2."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from slurmddp.errors import ExternalError, UserError
from slurmddp.images.registry.failures import NO_REGISTRY, outside
from slurmddp.images.registry.reference import is_digest

INDEXES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
MANIFESTS = ("application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json")
CONFIGURATIONS = ("application/vnd.oci.image.config.v1+json", "application/vnd.docker.container.image.v1+json")

#: Names that machines have for themselves, in Go's words, which images use.
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "ppc64el": "ppc64le"}


class Manifest(NamedTuple):
    """The digest and bytes of an image's configuration, and the bytes of its layers."""

    config_digest: str
    config_size: int
    layers_size: int


@dataclass(frozen=True)
class Document:
    """A JSON object that `host` sent as `what`, such as "the manifest of IMAGE". Its methods raise ExternalError."""

    tree: Mapping[str, Any]
    host: str
    what: str

    def unreadable(self) -> ExternalError:
        """Return the error for JSON that violates the specification."""
        return outside(f"{self.host} sent an invalid {self.what}", NO_REGISTRY)

    def items(self, key: str, kind: type) -> list[Any]:
        """Return the items of a list, all of this type."""
        items = self.tree.get(key)
        if not isinstance(items, list) or not all(isinstance(item, kind) for item in items):
            raise self.unreadable()
        return items

    def text(self, key: str) -> str:
        """Return one printable line; "" if there is none."""
        value = self.tree.get(key)
        if value is not None and not isinstance(value, str):
            raise self.unreadable()
        return self._one_line(key, value or "")

    def command(self, key: str) -> tuple[str, ...] | None:
        """Return the words of a command, each one printable line."""
        if self.tree.get(key) is None:
            return None
        return tuple(self._one_line(key, word) for word in self.items(key, str))

    def texts(self, key: str) -> tuple[str, ...]:
        """Return the texts of a list or null; "..." for one that is no single printable line."""
        texts = self.items(key, str) if self.tree.get(key) is not None else []
        return tuple(text if text.isprintable() else "..." for text in texts)

    def variables(self, key: str) -> dict[str, str]:
        """Return those of ["NAME=VALUE", ...] or null; the last of a name counts.

        One that is no single printable line is left out: the versions that are read from them are all such lines.
        """
        pairs = [text.partition("=") for text in self.texts(key)]
        return {name: text for name, mark, text in pairs if mark and name}

    def _one_line(self, key: str, text: str) -> str:
        # It is written into a definition file, where another line could open a section
        if not text.isprintable():
            todo = "use another image, or ask its publisher"
            raise outside(f"{self.host} sent {self.what} with a line break or control character in its {key}", todo)
        return text


def digest_of(body: bytes) -> str:
    """sha256:... of these bytes."""
    return "sha256:" + hashlib.sha256(body).hexdigest()


def read_object(body: bytes, host: str, what: str) -> Document:
    """The JSON object. Raises ExternalError for anything else, such as the page of a login portal."""
    try:
        tree = json.loads(body)
    except (ValueError, RecursionError):
        tree = None
    if not isinstance(tree, dict):
        todo = "check that the host is a registry, and that no proxy answers in its place"
        raise outside(f"{host} sent {what} that is not a JSON object", todo)
    return Document(tree, host, what)


def is_index(document: Document, content_type: str, image: str) -> bool:
    """Return whether it is an index of images, not one image's manifest.

    Raises UserError for schema 1, ExternalError for what is neither or both (CVE-2021-41190).
    """
    tree = document.tree
    if tree.get("schemaVersion") == 1 or "fsLayers" in tree:
        todo = "pull and push it again with a current Docker, or use another tag"
        raise UserError(f"{image} has Docker's old schema 1, which current container tools do not support", todo=todo)
    kind = tree.get("mediaType") or content_type.partition(";")[0].strip()
    index, manifest = "manifests" in tree, "config" in tree or "layers" in tree
    if index == manifest or (kind in INDEXES and not index) or (kind in MANIFESTS and not manifest):
        raise document.unreadable()
    return index


def choose(document: Document, architecture: str, image: str) -> str:
    """Return the digest of an index's image for Linux on this architecture. Attestations have no known platform.

    Raises ExternalError, and UserError that names the platforms that there are.
    """
    found: dict[tuple[str, str], str] = {}
    for entry in document.items("manifests", dict):
        platform = entry.get("platform")
        platform = platform if isinstance(platform, dict) else {}
        system, made_for = (
            text if isinstance(text, str) and text.isprintable() else ""
            for text in (platform.get("os"), platform.get("architecture"))
        )
        if not is_digest(entry.get("digest")):
            raise document.unreadable()
        if made_for not in ("", "unknown"):
            found.setdefault((system or "linux", made_for), entry["digest"])
    if ("linux", architecture) not in found:
        raise other_architecture(image, architecture, list(found))
    return found["linux", architecture]


def other_architecture(image: str, architecture: str, there: Sequence[tuple[str, str]]) -> UserError:
    """Return the message for a platform that is not among these (os, architecture) pairs."""
    names = sorted({name if system == "linux" else f"{system}/{name}" for system, name in there})
    todo = "use an image for the architecture of the nodes"
    return UserError(f"{image} is not available for {architecture}; it has: {', '.join(names) or 'none'}", todo=todo)


def read_manifest(document: Document, image: str) -> Manifest:
    """Raises ExternalError for one that is none, UserError for what is no container image (a chart, a .sif)."""
    config = document.tree.get("config")
    if not isinstance(config, dict):
        raise document.unreadable()
    digest, size, kind = (config.get(key) for key in ("digest", "size", "mediaType"))
    sizes = [layer.get("size") for layer in document.items("layers", dict)]
    if not is_digest(digest) or not isinstance(kind, str):
        raise document.unreadable()
    if not all(type(number) is int and number >= 0 for number in (size, *sizes)):
        raise document.unreadable()
    if kind not in CONFIGURATIONS:
        text = f"{image} is not a container image, but {''.join(c for c in kind[:80] if c.isprintable())!r}"
        raise UserError(text, todo="check name and tag; `apptainer pull oras://...` downloads a .sif from a registry")
    return Manifest(config["digest"], config["size"], sum(sizes))
