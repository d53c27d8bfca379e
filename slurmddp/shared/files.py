"""Files of a run folder that others may read at any moment."""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

#: No file of ours that is read whole comes near.
MAX_BYTES = 2**26
_BLOCK = 2**16


def write_whole(path: Path, text: str) -> None:
    """Write a file such that nobody ever sees half of it. Raises OSError.

    A link of this name is replaced, never followed: in a folder of several users, somebody else may have made it. Nor
    can they guess the temporary name. surrogateescape: paths that are not UTF-8 are written as the bytes that they are.
    """
    part = path.with_name(f"{path.name}.part-{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(part, flags, 0o644)  # whatever the umask: nobody else may write it
    try:
        with open(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
        part.replace(path)
    except OSError:  # a full disk keeps the name, and nothing in it
        part.unlink(missing_ok=True)
        raise


def open_plain(path: Path) -> BufferedReader:
    """Open for reading what must be a plain file. Raises OSError, also for a pipe, whose reading may never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return open(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def bounded_lines(file: BinaryIO, longest: int) -> Iterator[bytes]:
    """Yield the lines of a file; of a longer one its first `longest` + 1 bytes, and its line break if it has one."""
    while line := file.readline(longest + 1):
        if len(line) > longest and not line.endswith(b"\n"):
            rest = line
            while rest and not rest.endswith(b"\n"):
                rest = file.readline(_BLOCK)
            line += rest[-1:]
        yield line


def read_plain(path: Path, limit: int = MAX_BYTES) -> bytes:
    """Return at most the first `limit` bytes of a plain file. Raises OSError."""
    with open_plain(path) as file:
        return file.read(limit)


def read_json(path: Path) -> Any:
    """Return the value of a JSON file; bytes that are no UTF-8 stay as surrogates. Raises OSError, ValueError if
    damaged.
    """
    try:
        return json.loads(read_plain(path).decode("utf-8", errors="surrogateescape"))
    except RecursionError:
        raise ValueError("is nested too deeply") from None
