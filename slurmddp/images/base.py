"""What an image starts from: an NGC release, an image in a registry, an archive, a .sif, a folder."""

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slurmddp.errors import UserError
from slurmddp.images import releases
from slurmddp.images.registry.documents import ARCHITECTURES
from slurmddp.images.registry.reference import parse_reference
from slurmddp.images.releases import Release

# A SIF begins with a launch line of 32 bytes, then the magic word, a version and the code of an architecture, each
# ended by a NUL, then the image's id, a UUID (sylabs/sif, pkg/sif/sif.go, header; pkg/sif/arch.go).
_MAGIC_OFFSET = 32
_MAGIC = b"SIF_MAGIC\0"
_ARCHITECTURE = slice(45, 47)
_ID = slice(48, 64)
_ARCHITECTURES = {
    b"01": "386", b"02": "amd64", b"03": "arm", b"04": "arm64", b"05": "ppc64", b"06": "ppc64le",
    b"11": "s390x", b"12": "riscv64",
}  # fmt: skip


def is_sif(path: Path) -> bool:
    """Return whether the file begins as a SIF does. Raises OSError where it cannot be read."""
    return _header(path)[_MAGIC_OFFSET : _MAGIC_OFFSET + len(_MAGIC)] == _MAGIC


def sif_architecture(path: Path) -> str | None:
    """Return the architecture of a SIF in Go's words (amd64, arm64); None if it does not say, or is no SIF.

    Raises OSError where it cannot be read.
    """
    return _ARCHITECTURES.get(_header(path)[_ARCHITECTURE]) if is_sif(path) else None


def sif_id(path: Path) -> str | None:
    """Return the id in a SIF file's header, as a UUID; None for another kind of file. Raises OSError."""
    import uuid  # here: 5 ms that only submissions need

    header = _header(path)
    return str(uuid.UUID(bytes=header[_ID])) if is_sif(path) and len(header) == _ID.stop else None


def _header(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_ID.stop)


Bootstrap = Literal["docker", "localimage", "docker-archive"]

FORMS = "an NGC release (25.04), docker://REFERENCE, docker-archive:FILE, a .sif file or a root folder"

# `docker:` and `docker-archive:` are ours to read; every other word before :// is a kind that Apptainer knows
# and we do not
_SCHEME = re.compile(r"(docker|docker-archive|[A-Za-z][A-Za-z0-9-]*(?=://)):(.*)")
# Apptainer hands a source of %files to /bin/sh on the host, for its patterns, and cuts its line at quotes
# (internal/pkg/build/files/files.go, expandPath): a file called `$(id)` would be a command.
_CARRIED = re.compile(r"[\w@%+=:,./ -]+")
_LOOKS_LIKE_REGISTRY = re.compile(r"[a-z0-9][\w.-]*(:\d+)?(/[a-z0-9][\w.-]*)*(:[\w.-]+)?(@sha256:[0-9a-f]+)?")


@dataclass(frozen=True)
class Base:
    """The two header lines of a definition file: `Bootstrap: <bootstrap>`, `From: <source>`.

    Raises UserError for a source that a header line would not carry unchanged.
    """

    bootstrap: Bootstrap
    source: str  # a registry name without docker://, or an absolute path
    release: Release | None = None  # the NGC release that it is, where known

    def __post_init__(self) -> None:
        _check_source(self.source)

    @property
    def reference(self) -> str:
        """The base as `parse_base` takes it."""
        prefix = {"docker": "docker://", "docker-archive": "docker-archive:", "localimage": ""}
        return prefix[self.bootstrap] + self.source


@dataclass(frozen=True)
class Pin:
    """What a base in a registry is pulled by: its repository, at the mirror where there is one, and its digest.

    Without the tag, since some programs refuse a name that has both (containers/image, docker transport).
    """

    repository: str
    digest: str

    def __str__(self) -> str:
        return f"{self.repository}@{self.digest}"


def check_text(text: str, what: str) -> None:
    """Raise UserError for a text that a definition file would not carry unchanged.

    Apptainer takes {{ name }} for a build argument wherever it stands in the file.
    """
    problem = ""
    if not text.isprintable():  # also bytes of a file name that are no UTF-8
        problem = "a line break, a control character or a character that UTF-8 cannot encode"
    elif "{{" in text or "}}" in text:
        problem = "'{{' or '}}', which Apptainer would read as a build argument"
    elif text.endswith("\\") or text != text.strip():
        problem = "a backslash at its end, or a space at its start or end"
    if problem:
        raise UserError(f"{what} {text!r} contains {problem}", todo="rename it, or link to it under another name")


def _check_source(text: str) -> None:
    """A header line ends at '#' and continues after a backslash (apptainer, parser/deffile.go, doHeader)."""
    check_text(text, "the base")
    if "#" in text:
        todo = "rename it, or link to it under another name"
        raise UserError(f"the base {text!r} contains '#', which begins a comment in a definition file", todo=todo)


def is_carried(path: str) -> bool:
    """Return whether %files carries this path unchanged: as a source it reaches a shell on the host."""
    return _CARRIED.fullmatch(path) is not None and path == path.strip()


def check_architecture(base: Base) -> None:
    """Raise UserError for a .sif that was made for other processors than this machine's."""
    if base.bootstrap != "localimage" or os.path.isdir(base.source):
        return
    here = ARCHITECTURES.get(platform.machine(), platform.machine())
    try:
        architecture = sif_architecture(Path(base.source))
    except OSError:
        return  # whoever reads it next says so
    if architecture not in (None, here):
        todo = f"use a base for {here}, or build on a machine of the architecture that will run it"
        raise UserError(f"the base {base.source} is for {architecture}, but this machine is {here}", todo=todo)


def parse_base(text: str, cwd: Path, where: str | None = "--base") -> Base:
    """The base that `text` names; relative paths begin at `cwd`.

    Raises UserError; `where` stands in its message.
    """
    try:
        return _parse(text, cwd)
    except UserError as error:
        raise UserError(error.what, where=error.where or where, todo=error.todo) from None


def _parse(text: str, cwd: Path) -> Base:
    if not text.strip():
        raise UserError("the base is empty", todo=f"write {FORMS}")
    _check_source(text)
    if tag := releases.TAG.fullmatch(text):
        return Base("docker", releases.reference(tag[1]), releases.releases().get(tag[1]))
    scheme = _SCHEME.fullmatch(text)
    if scheme and not _exists(cwd / text):
        return _with_scheme(scheme.group(1), scheme.group(2), cwd)
    return _local(text, cwd)


def _with_scheme(scheme: str, rest: str, cwd: Path) -> Base:
    if scheme == "docker":
        name = rest.removeprefix("//")
        if not rest.startswith("//"):
            raise UserError(f"'docker:{rest}' is not an image in a registry", todo="write docker://HOST/NAME:TAG")
        parse_reference(name)
        return Base("docker", name, releases.of_reference(name))
    if scheme == "docker-archive":
        path = _absolute(rest.removeprefix("//"), cwd)
        if not path.is_file():
            raise UserError(f"the archive {path} does not exist", todo="`docker save IMAGE -o FILE` writes one")
        return Base("docker-archive", str(path))
    raise UserError(f"unknown kind of base: {scheme!r}", todo=f"write {FORMS}")


def _local(text: str, cwd: Path) -> Base:
    path = _absolute(text, cwd)
    if not _exists(path):
        looks = _LOOKS_LIKE_REGISTRY.fullmatch(text) and not text.endswith((".sif", ".img", ".tar"))
        todo = f"write docker://{text} if it is in a registry" if looks else f"write {FORMS}"
        raise UserError(f"the base {path} does not exist", todo=todo)
    if path.is_dir():
        _check_root(path)
        return Base("localimage", str(path))
    try:
        has_image = is_sif(path)
    except OSError as error:
        raise UserError(f"the base {path} cannot be read: {error.strerror}") from None
    if not has_image:
        todo = f"docker-archive:{text} if `docker save` wrote it" if path.suffix == ".tar" else f"write {FORMS}"
        raise UserError(f"the base {path} is not a SIF image", todo=todo)
    return Base("localimage", str(path))


def _check_root(path: Path) -> None:
    """A root filesystem has a shell and its /etc; links in it may be absolute, so they are not followed."""
    shell = any(os.path.lexists(path / name) for name in ("bin/sh", "usr/bin/sh"))
    if path == Path("/"):
        raise UserError("the base is this machine's own root folder", todo=f"write {FORMS}")
    if not shell or not os.path.lexists(path / "etc"):
        missing = "etc" if shell else "bin/sh"
        todo = "give the folder that contains bin, etc and usr, or a .sif"
        raise UserError(f"the base folder {path} is not a root filesystem: it has no {missing}", todo=todo)


def _absolute(text: str, cwd: Path) -> Path:
    return Path(os.path.abspath(cwd / text))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that is too long, a folder that may not be entered
        return False
