"""Which files ADD unpacks."""

from __future__ import annotations

import bz2
import gzip
import lzma
import shlex
import tarfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
