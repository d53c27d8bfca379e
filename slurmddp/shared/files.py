"""Files of a run folder that others may read at any moment."""

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

from slurmddp.shared import beneath

#: No file of ours that is read whole comes near.
MAX_BYTES = 2**26
_BLOCK = 2**16


def write_whole(path: Path, text: str, folder: int | None = None) -> None:
    """Write a file such that nobody ever sees half of it. folder: a descriptor of its folder. Raises OSError.

    A link of this name is replaced, never followed: in a folder of several users, somebody else may have made it. Nor
    can they guess the temporary name. surrogateescape: paths that are not UTF-8 are written as the bytes that they are.
    """
    target = str(path) if folder is None else path.name
    part = f"{target}.part-{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(part, flags, 0o644, dir_fd=folder)  # whatever the umask: nobody else may write it
    try:
        with open(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
        os.rename(part, target, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:  # a full disk keeps the name, and nothing in it
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part, dir_fd=folder)
        raise


def open_plain(path: Path, below: Path | None = None) -> BufferedReader:
    """Open for reading what must be a plain file. Raises OSError, also for a pipe, whose reading may never end.

    below: a folder that another user may have filled; no link below it leads out of it (`beneath.open_below`).
    """
    if below is None:
        return beneath.regular(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), str(path))
    folder = beneath.open_folder(below)
    try:
        return beneath.open_below(folder, beneath.parts_below(path, below))
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(folder)


def bounded_lines(file: BinaryIO, longest: int) -> Iterator[bytes]:
    """Yield the lines of a file; of a longer one its first `longest` + 1 bytes, and its line break if it has one."""
    while line := file.readline(longest + 1):
        if len(line) > longest and not line.endswith(b"\n"):
            rest = line
            while rest and not rest.endswith(b"\n"):
                rest = file.readline(_BLOCK)
            line += rest[-1:]
        yield line


def read_plain(path: Path, limit: int = MAX_BYTES, below: Path | None = None) -> bytes:
    """Return at most the first `limit` bytes of a plain file. below: as for `open_plain`. Raises OSError."""
    with open_plain(path, below) as file:
        return file.read(limit)


def text_or_empty(path: Path) -> str:
    """Return the text of a small ASCII file; empty if it is missing or cannot be read."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def read_json(path: Path, below: Path | None = None) -> Any:
    """Return the value of a JSON file; bytes that are no UTF-8 stay as surrogates. below: as for `open_plain`.

    Raises OSError, ValueError if damaged.
    """
    try:
        return json.loads(read_plain(path, below=below).decode("utf-8", errors="surrogateescape"))
    except RecursionError:
        raise ValueError("is nested too deeply") from None
