"""Append-only JSON lines that many processes, attempts and commands may write to at once."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmddp.records import json_lines
from slurmddp.shared import beneath


class JsonLines:
    """A file of JSON objects, one a line.

    Each line is one os.write on a descriptor opened with O_APPEND: lines of several processes never mix
    (POSIX promises it on one host; on NFS two hosts that append at the same moment may overwrite each other,
    which is why each file has few writers).
    """

    def __init__(self, path: Path, *, folder: int | None = None) -> None:
        """Makes the file where there is none. Raises OSError, also where its folder is missing.

        folder: a descriptor of the file's folder, in which no link is followed.
        """
        self.path = path
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        if folder is None:
            self._descriptor = os.open(path, flags, 0o666)
        else:
            flags |= os.O_NOFOLLOW | os.O_NONBLOCK
            self._descriptor = os.open(path.name, flags, 0o666, dir_fd=folder)
            beneath.require_regular(self._descriptor, str(path))
        size = os.fstat(self._descriptor).st_size
        # A line that was cut, by the end of its writer or by a full disk, must not take the next one with it.
        self._cut = size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one object. Raises OSError."""
        line = json_lines.dump(record)
        if self._cut:
            line = b"\n" + line
        written = os.write(self._descriptor, line)
        self._cut = written != len(line)
        if self._cut:
            raise OSError(f"{self.path}: only {written} of {len(line)} bytes were written (is the disk full?)")

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> "JsonLines":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
