"""Names of images in registries, as Docker reads them (distribution/reference, normalize.go and regexp.go)."""

import re
from dataclasses import dataclass

from slurmddp.errors import UserError

DOCKER_HUB = "docker.io"
DEFAULT_TAG = "latest"
_HUB_NAMES = (DOCKER_HUB, "index.docker.io", "registry-1.docker.io")
_LONGEST_NAME = 255

_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_HOST = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[0-9A-Fa-f:.]+\])(?::(?P<port>[0-9]{{1,5}}))?", re.ASCII)
_PART = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")

FORMS = "write HOST/NAME:TAG or HOST/NAME@sha256:DIGEST, such as nvcr.io/nvidia/pytorch:25.04-py3"


@dataclass(frozen=True)
class Reference:
    """An image in a registry, spelled out: `ubuntu` is docker.io, library/ubuntu, latest."""

    registry: str  # host, with its port where it has one
    name: str  # the repository's path in it
    tag: str | None = None  # None where only a digest was written
    #: "sha256:" and 64 digits; where there is one, it decides, and the tag is only read by people
    digest: str | None = None

    @property
    def repository(self) -> str:
        """Registry and name, without tag and digest."""
        return f"{self.registry}/{self.name}"

    @property
    def selector(self) -> str:
        """Return what a registry is asked for: the digest, else the tag."""
        return self.digest or self.tag or DEFAULT_TAG

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        return f"{self.repository}{tag}" + (f"@{self.digest}" if self.digest else "")


def parse_reference(text: str) -> Reference:
    """The image that `text` names, with or without docker:// before it. Raises UserError."""
    body = text.removeprefix("docker://")
    if not body:
        raise UserError("the image name is empty", todo=FORMS)
    if not body.isascii() or not body.isprintable() or " " in body:
        raise _wrong(text, "contains a space or another character that is not allowed in image names")
    rest, at, digest = body.partition("@")
    if at:
        algorithm, colon, _ = digest.partition(":")
        if colon and algorithm != "sha256":
            raise _wrong(text, f"has a digest of type {algorithm!r}; only sha256 is supported")
        if not is_digest(digest):
            raise _wrong(text, "has an invalid digest", "a digest is sha256: and 64 characters of 0-9 a-f")
    registry, path = DOCKER_HUB, rest
    first, slash, behind = rest.partition("/")  # the first part is a registry if no Docker Hub name begins with it
    if slash and _is_no_hub_name(first):
        registry, path = canonical_registry(first), behind
    name, colon, tag = path.partition(":")
    if colon and not _TAG.fullmatch(tag):
        todo = "a tag is 1 to 128 of A-Z a-z 0-9 _ . - and begins with a letter, a digit or _"
        raise _wrong(text, f"has the invalid tag {tag!r}", todo)
    if not is_registry(registry):
        raise _wrong(text, f"has the invalid registry {registry!r} (it must be HOST or HOST:PORT)")
    if name != name.lower():
        raise _wrong(text, "has capital letters in its name", f"write {name.lower()!r}")
    if not all(_PART.fullmatch(part) for part in name.split("/")):
        raise _wrong(text, f"has the invalid name {name!r}")
    if registry == DOCKER_HUB and "/" not in name:
        name = f"library/{name}"
    if len(f"{registry}/{name}") > _LONGEST_NAME:
        raise UserError(f"the image name is longer than {_LONGEST_NAME} characters", todo=FORMS)
    return Reference(registry, name, tag or (None if at else DEFAULT_TAG), digest or None)


def is_digest(text: object) -> bool:
    """Return whether it is a SHA-256 digest as registries write it."""
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None


def canonical_registry(host: str) -> str:
    """The one name of a registry that has several: docker.io for Docker Hub; host names in lower case, where that is
    not read as a name on Docker Hub."""
    lower = host.lower()
    return DOCKER_HUB if lower in _HUB_NAMES else lower if _is_no_hub_name(lower) else host


def _is_no_hub_name(first: str) -> bool:
    return any(mark in first for mark in ".:[") or first == "localhost" or first != first.lower()


def is_registry(host: str) -> bool:
    """Return whether it is HOST or HOST:PORT."""
    match = _HOST.fullmatch(host)
    port = match.group("port") if match else None
    return match is not None and (port is None or 0 < int(port) < 65536)


def _wrong(text: str, problem: str, todo: str = FORMS) -> UserError:
    return UserError(f"the image {text!r} {problem}", todo=todo)
