"""Reads manifests, indexes and configurations: OCI image-spec 1.1 and Docker's image manifest version 2, schema 2."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurmddp.errors import ExternalError, UserError
from slurmddp.images.registry.failures import NO_REGISTRY, outside
from slurmddp.images.registry.reference import is_digest

INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
CONFIGURATIONS = (
    "application/vnd.oci.image.config.v1+json",
    "application/vnd.docker.container.image.v1+json",
)

#: Names that machines have for themselves, in Go's words, which images use.
ARCHITECTURES = {
    "x86_64": "amd64",
    "aarch64": "arm64",
    "ppc64el": "ppc64le",
}


@dataclass(frozen=True)
class Platform:
    """One entry of an index: whose it is and where its manifest is."""

    architecture: str
    os: str
    digest: str


@dataclass(frozen=True)
class Manifest:
    """Of one image: its configuration's digest, bytes and media type, and the bytes of its layers."""

    config_digest: str
    config_size: int
    config_type: str
    layers_size: int


def digest_of(body: bytes) -> str:
    """sha256:... of these bytes."""
    return "sha256:" + hashlib.sha256(body).hexdigest()


def verify(body: bytes, digest: str, host: str, what: str) -> None:
    """Raise ExternalError where the bytes are not those that the digest promises."""
    if digest_of(body) != digest:
        raise outside(
            f"{host} lies about {what}: its bytes have the digest {digest_of(body)}, not {digest}",
            "try again; if it stays so, a proxy or mirror changes what passes, or the registry is broken",
        )


def read_object(body: bytes, host: str, what: str) -> Mapping[str, Any]:
    """The JSON object. Raises ExternalError for anything else, such as the page of a login portal."""
    try:
        tree = json.loads(body)
    except (ValueError, RecursionError):
        tree = None
    if not isinstance(tree, dict):
        raise outside(
            f"what {host} sends as {what} is no JSON object",
            "check the host: is it a registry, or does a proxy answer with a page of its own?",
        )
    return tree


def is_index(tree: Mapping[str, Any], content_type: str, host: str, image: str) -> bool:
    """Whether it is an index of images, not one image's manifest.

    Raises UserError for schema 1, ExternalError for what is neither or both (CVE-2021-41190).
    """
    if tree.get("schemaVersion") == 1 or "fsLayers" in tree:
        raise UserError(
            f"{image} is stored in Docker's old schema 1, which current container tools do not read either",
            todo="pull and push it again with a current Docker, or take another tag",
        )
    kind = tree.get("mediaType") or content_type.partition(";")[0].strip()
    index, manifest = "manifests" in tree, "config" in tree or "layers" in tree
    if index == manifest or (kind in INDEXES and not index) or (kind in MANIFESTS and not manifest):
        raise unreadable(host, f"the manifest of {image}")
    return index


def platforms(tree: Mapping[str, Any], host: str, image: str) -> list[Platform]:
    """The images of an index; attestations, whose platform is unknown, are left out. Raises ExternalError."""
    found = []
    for entry in _objects(tree.get("manifests"), host, f"the index of {image}"):
        platform = entry.get("platform")
        platform = platform if isinstance(platform, dict) else {}
        architecture, system = _text(platform.get("architecture")), _text(platform.get("os"))
        if not is_digest(entry.get("digest")):
            raise unreadable(host, f"the index of {image}")
        if architecture and architecture != "unknown":
            found.append(Platform(architecture, system or "linux", entry["digest"]))
    return found


def choose(found: Sequence[Platform], architecture: str, image: str) -> Platform:
    """The one for Linux on this architecture. Raises UserError that names those that there are."""
    for platform in found:
        if platform.os == "linux" and platform.architecture == architecture:
            return platform
    raise other_architecture(image, architecture, [(platform.os, platform.architecture) for platform in found])


def other_architecture(image: str, architecture: str, there: Sequence[tuple[str, str]]) -> UserError:
    """Of (os, architecture) pairs that there are."""
    names = sorted({name if system == "linux" else f"{system}/{name}" for system, name in there})
    return UserError(
        f"{image} is not made for {architecture}: there is {', '.join(names) or 'nothing'}",
        todo="take an image of the architecture of the nodes that will run it",
    )


def read_manifest(tree: Mapping[str, Any], host: str, image: str) -> Manifest:
    """Raises ExternalError for one that is none, UserError for what is no container image (a chart, a .sif)."""
    what = f"the manifest of {image}"
    config = tree.get("config")
    layers = _objects(tree.get("layers"), host, what)
    if not isinstance(config, dict) or not is_digest(config.get("digest")):
        raise unreadable(host, what)
    size, kind = config.get("size"), config.get("mediaType")
    sizes = [layer.get("size") for layer in layers]
    if not all(type(number) is int and number >= 0 for number in (size, *sizes)) or not isinstance(kind, str):
        raise unreadable(host, what)
    if kind not in CONFIGURATIONS:
        raise UserError(
            f"{image} is no container image but {''.join(c for c in kind[:80] if c.isprintable())!r}",
            todo="check name and tag; `apptainer pull oras://...` fetches a .sif that is kept in a registry",
        )
    return Manifest(config["digest"], size or 0, kind, sum(number or 0 for number in sizes))


def variables(value: Any, host: str, what: str) -> dict[str, str]:
    """Of ["NAME=VALUE", ...] or null; the last of a name counts. Raises ExternalError.

    A variable that is no single printable line is left out: the versions that are read from them are all such lines.
    """
    pairs = [text.partition("=") for text in _list(value, host, what) or () if text.isprintable()]
    return {name: text for name, mark, text in pairs if mark and name}


def words(value: Any, host: str, what: str) -> tuple[str, ...] | None:
    """A command as a list of single printable lines, or null: it is written into a definition. Raises ExternalError."""
    found = _list(value, host, what)
    if found is not None and not all(text.isprintable() for text in found):
        raise not_one_line(host, what, "Entrypoint")
    return found


def not_one_line(host: str, what: str, key: str) -> ExternalError:
    """Of a value that could open a section of a definition file."""
    return outside(
        f"what {host} sends as {what} holds a line break or a control character in its {key}",
        "such an image is not built from: take another one, or ask who made it",
    )


def _list(value: Any, host: str, what: str) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise unreadable(host, what)
    return tuple(value)


def _objects(value: Any, host: str, what: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise unreadable(host, what)
    return value


def _text(value: Any) -> str:
    return value if isinstance(value, str) and value.isprintable() else ""


def unreadable(host: str, what: str) -> ExternalError:
    """Of a document that is JSON but not what the specification says."""
    return outside(f"what {host} sends as {what} does not follow the specification", NO_REGISTRY)
