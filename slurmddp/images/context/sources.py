"""What a COPY or an ADD takes from this machine, and where it lies when %post begins."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import re
import shlex
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slurmddp.images.context.staging import FOLDER, Item
from slurmddp.images.context.tree import Context

if TYPE_CHECKING:
    from slurmddp.images.dockerfile.copying import Copy
    from slurmddp.images.dockerfile.lines import Instruction


_ZSTANDARD = b"\x28\xb5\x2f\xfd"
_PACKED: dict[bytes, Any] = {
    b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open,
}  # fmt: skip


def is_archive(path: Path, instruction: Instruction) -> bool:
    """Return whether ADD unpacks the file: it goes by the content, not by the name. Raises UserError."""
    try:
        with path.open("rb") as file:
            begin = file.read(8)
        if begin.startswith(_ZSTANDARD):
            todo = f"unpack it before and COPY the folder, instead of ADD {shlex.quote(path.name)}"
            raise instruction.error(f"ADD of {path.name}, a Zstandard archive, is not converted", todo)
        unpack = next((unpack for magic, unpack in _PACKED.items() if begin.startswith(magic)), open)
        with unpack(path, "rb") as whole:
            # Its first header alone: tarfile would also read an extended one, however long that says it is
            header = whole.read(tarfile.BLOCKSIZE)
    except OSError as error:
        if error.errno is None:  # damaged, so Docker would copy it as it is
            return False
        raise instruction.error(f"{path} cannot be read: {error.strerror}", "make it readable") from None
    except (EOFError, zlib.error, lzma.LZMAError):
        return False
    try:
        tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True


STAGING = "/.slurmddp"
ADDRESS = re.compile(r"(?:[a-z][a-z0-9+.-]*://|git@)")


@dataclass(frozen=True)
class Staged:
    """Where the sources of a COPY are when %post begins."""

    files: tuple[tuple[str, str], ...]  # the (source, destination) of %files, one for each of the numbers that it took
    places: tuple[str, ...]  # in the folder of the number; one with a pattern is the shell's to expand
    archives: frozenset[str] = frozenset()  # those that ADD unpacks
    items: tuple[Item, ...] = ()  # what is gathered from this machine
    kept: tuple[str, ...] = ()  # what their stage has to keep of its /tmp and /var/tmp, for the shell


def from_context(copy: Copy, number: int, context: Context) -> Staged:
    """A COPY or ADD of files of the build context. Raises UserError."""
    places: list[str] = []
    archives: set[str] = set()
    items: list[Item] = []
    sources = [
        (path, origin.partition("/./")[0] if "/./" in origin else ".")
        for origin in copy.origins
        if not ADDRESS.match(origin)
        for path in context.sources(origin, copy.instruction)
    ]
    if len(sources) > 1 and not (copy.into_folder or copy.parents):
        todo = f"end the destination with /: {copy.instruction.text}/"
        raise copy.instruction.error(f"{len(sources)} sources match, but the destination is not a folder", todo)
    for source, pivot in sources:
        tree = context.collect(source, copy.exclude, copy.instruction)
        if not tree.entries:
            continue
        if copy.parents:
            tree = tree.below(os.path.relpath(source, pivot), context.folder / pivot)
        count = number + len(places)
        inside = f"{FOLDER}/{count}/from" if tree.folder else f"{FOLDER}/{count}"
        items += [Item(f"{inside}/{name}".rstrip("/"), path, whole) for path, name, whole in tree.entries]
        if not source.isprintable():
            raise copy.instruction.error(f"the file name {source!r} is not plain text", "rename the file")
        places.append(f"{STAGING}/{count}/{'from' if tree.folder else tree.entries[0][1]}")
        if copy.instruction.keyword == "ADD" and not tree.folder and is_archive(tree.entries[0][0], copy.instruction):
            archives.add(places[-1])
    for count, (url, name) in enumerate(copy.addresses, number + len(places)):
        where = copy.instruction.where
        items.append(Item(f"{FOLDER}/{count}/{name}", Path(), url=url, checksum=copy.checksum, where=where))
        places.append(f"{STAGING}/{count}/{name}")
    files = ((f"/{number + count}", f"{STAGING}/") for count in range(len(places)))
    return Staged(tuple(files), tuple(places), frozenset(archives), tuple(items))
