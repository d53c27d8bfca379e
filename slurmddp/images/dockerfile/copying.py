"""COPY and ADD: what %files carries into /.slurmddp, and the commands that put it where the Dockerfile says.

%files all come before %post, and Apptainer's own rules of where a file ends up are not Docker's. So each source goes
to a numbered folder first, and to its place when its turn comes.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import posixpath
import re
import shlex
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmddp.images.dockerfile.ignore import Ignore
from slurmddp.images.dockerfile.lines import Instruction, split
from slurmddp.images.dockerfile.tree import collect, sources
from slurmddp.images.dockerfile.words import Lookup, known, shell

STAGING = "/.slurmddp"

_ADDRESS = re.compile(r"(?:[a-z][a-z0-9+.-]*://|git@)")
_ZSTANDARD = b"\x28\xb5\x2f\xfd"
_PACKED: dict[bytes, Any] = {
    b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open,
}  # fmt: skip
_OWNER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(:[A-Za-z0-9_][A-Za-z0-9_.-]*)?")
_MODE = re.compile(r"[0-7]{3,4}|[ugoa]*[-+=][rwxXst]*(,[ugoa]*[-+=][rwxXst]*)*")
_MAGIC = re.compile(r"[*?\[]")
_FROM_STAGE = re.compile(r"/[\w@%+=:,./*?\[\]-]+")


@dataclass(frozen=True)
class Copy:
    """One COPY or ADD, read.

    stage: what --from names, else None.
    owner: user:group for chown; mode: for chmod, or "".
    """

    instruction: Instruction
    origins: tuple[str, ...]
    destination: str
    stage: str | None
    owner: str
    mode: str


@dataclass(frozen=True)
class Staged:
    """What a COPY becomes.

    files:    the (source, destination) of %files.
    commands: lines of %post.
    count:    how many numbers it took.
    paths:    local ones whose content goes in.
    """

    files: tuple[tuple[str, str], ...]
    commands: tuple[str, ...]
    count: int
    paths: tuple[Path, ...] = ()


def read_copy(instruction: Instruction, lookup: Lookup, workdir: str) -> Copy:
    """Read a COPY or an ADD; a relative destination begins at `workdir`. Raises UserError."""
    raw = instruction.array() or split(instruction.text, instruction.escape)
    words = [known(word, lookup, instruction) for word in raw]
    if len(words) < 2:
        raise instruction.error(f"{instruction.keyword} needs a source and a destination", "COPY SOURCE DESTINATION")
    flags = {name: known(value, lookup, instruction) for name, value in instruction.flags}
    *origins, destination = words
    if len(origins) > 1 and not destination.endswith("/"):
        raise instruction.error(f"several sources need a folder, and {destination!r} is none", "end it with /")
    for origin in origins:
        if _ADDRESS.match(origin):
            raise instruction.error(
                "ADD of an address is not converted",
                f"fetch it by a program of the image: RUN curl -fsSL -o FILE {origin}; or COPY a file fetched before",
            )
    owner, mode = flags.get("chown") or "0:0", flags.get("chmod", "")
    if not _OWNER.fullmatch(owner):
        raise instruction.error(f"--chown={owner} is not USER:GROUP", "write --chown=USER:GROUP")
    if mode and not _MODE.fullmatch(mode):
        raise instruction.error(f"--chmod={mode} is not a mode", "write --chmod=755")
    return Copy(instruction, tuple(origins), place(destination, workdir), flags.get("from"), owner, mode)


def place(path: str, workdir: str) -> str:
    """The path, absolute; a slash at its end, which makes it a folder, stays."""
    whole = posixpath.normpath("/" + posixpath.join(workdir, path)).replace("//", "/")
    folder = path.endswith("/") or path.rsplit("/", 1)[-1] in (".", "..")
    return whole.rstrip("/") + "/" if folder else whole


def from_stage(copy: Copy, number: int) -> Staged:
    """A COPY --from; its sources are staged as `number` and the next ones. Raises UserError."""
    files, commands = [], []
    for count, origin in enumerate(copy.origins):
        source = posixpath.normpath("/" + origin).replace("//", "/")
        if not _FROM_STAGE.fullmatch(source):
            raise copy.instruction.error(
                f"{origin!r} of another stage cannot be copied by Apptainer",
                "name folders one by one, without spaces, quotes and such characters",
            )
        above, name = posixpath.split(source)
        pattern = bool(_MAGIC.search(name))
        if _MAGIC.search(above):
            raise copy.instruction.error(f"{origin!r} has a pattern in a folder's name", "name the folder")
        staged = f"{STAGING}/{number + count}"
        files.append((source, f"{staged}/"))
        commands.append(_call(copy, f"{staged}/*" if pattern else f"{staged}/{name}", pattern))
    return Staged(tuple(files), tuple(commands), len(copy.origins))


def from_context(copy: Copy, number: int, context: Path, ignore: Ignore) -> Staged:
    """A COPY or ADD of files beside the Dockerfile. Raises UserError."""
    files: list[tuple[str, str]] = []
    commands: list[str] = []
    paths: list[Path] = []
    found = [path for origin in copy.origins for path in sources(context, origin, ignore, copy.instruction)]
    if len(found) > 1 and not copy.destination.endswith("/"):
        todo = f"end the destination with /: {copy.destination}/"
        raise copy.instruction.error(f"{len(found)} sources match, and the destination is no folder", todo)
    for count, source in enumerate(found):
        folder = f"{STAGING}/{number + count}"
        tree = collect(context, source, ignore, copy.instruction)
        files += [(str(path), f"{folder}/{name}".rstrip("/")) for path, name in tree.entries]
        paths += [path for path, _ in tree.entries]
        if tree.folder and [name for _, name in tree.entries] != [""]:
            commands.append(f"mkdir -p {folder}")
        for name, mode in tree.folders:
            commands.append(f"mkdir -p {shell(f'{folder}/{name}')} && chmod {mode:o} {shell(f'{folder}/{name}')}")
        for target, name in tree.links:
            commands.append(f"ln -s {shell(_plain(target, copy))} {shell(_plain(f'{folder}/{name}', copy))}")
        staged = folder if tree.folder else f"{folder}/{tree.entries[0][1]}"
        if copy.instruction.keyword == "ADD" and not tree.folder and _is_archive(tree.entries[0][0], copy):
            if copy.instruction.flags:
                raise copy.instruction.error("ADD of an archive with an option is not converted", "RUN chown after it")
            commands.append(
                f"mkdir -p {shell(copy.destination)} && tar -xf {shell(staged)} -C {shell(copy.destination)}"
            )
        else:
            commands.append(_call(copy, staged))
    return Staged(tuple(files), tuple(commands), len(found), tuple(paths))


def _call(copy: Copy, staged: str, pattern: bool = False) -> str:
    """A call of the template's function; a pattern is the shell's to expand."""
    word = staged if pattern else shell(staged)
    return " ".join(["copy", shell(copy.owner), shell(copy.mode), shell(copy.destination), word])


def _plain(name: str, copy: Copy) -> str:
    if not name.isprintable() or name.startswith("-"):
        raise copy.instruction.error(f"the link {name!r} has a name that is not carried", "rename it")
    return name


def _is_archive(path: Path, copy: Copy) -> bool:
    """Whether ADD unpacks the file: it goes by the content, not by the name."""
    try:
        with path.open("rb") as file:
            begin = file.read(8)
        if begin.startswith(_ZSTANDARD):
            todo = f"unpack it before and COPY the folder, instead of ADD {shlex.quote(path.name)}"
            raise copy.instruction.error(f"ADD of {path.name}, a Zstandard archive, is not converted", todo)
        unpack = next((unpack for magic, unpack in _PACKED.items() if begin.startswith(magic)), open)
        with unpack(path, "rb") as whole:
            # Its first header alone: tarfile would also read an extended one, however long that says it is
            header = whole.read(tarfile.BLOCKSIZE)
    except OSError as error:
        if error.errno is None:  # damaged, so Docker would copy it as it is
            return False
        raise copy.instruction.error(f"{path} cannot be read: {error.strerror}", "make it readable") from None
    except (EOFError, zlib.error, lzma.LZMAError):
        return False
    try:
        tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True
