"""What the nodes could not send waits in the run's boxes; whoever uses the login node next sends it."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterable
from pathlib import Path

from slurmddp.alerts import secrets
from slurmddp.records.alert import Message
from slurmddp.runs.gate import Held, hold, own_or_none
from slurmddp.runs.layout import RunFolder
from slurmddp.supervisor import post
from slurmddp.supervisor.spool import Box, Delivered, Disk, is_part_of_message, total


class _HeldDisk(Disk):
    """A folder that other users may have filled: nothing is followed, and nothing changed, that is not this user's."""

    def __init__(self, held: Held) -> None:
        self._held = held

    def folders(self, path: Path) -> list[tuple[float, str]]:
        with self._held.inside(path, listed=True) as folder:
            found = [(os.stat(name, dir_fd=folder, follow_symlinks=False), name) for name in os.listdir(folder)]
        return [(facts.st_mtime, name) for facts, name in found if stat.S_ISDIR(facts.st_mode)]

    def read(self, path: Path, limit: int) -> bytes:
        return self._held.read(path, limit)

    def write(self, path: Path, data: bytes) -> None:
        self._held.write(path, data.decode("utf-8", errors="surrogateescape"))

    def append(self, path: Path, text: str) -> None:
        self._held.append_text(path, text)

    def make(self, path: Path) -> None:
        self._held.make(path)

    def move(self, path: Path, target: Path) -> None:
        self._held.move(path, target)

    def remove(self, path: Path) -> None:
        with self._held.inside(path, listed=True) as folder:
            for name in os.listdir(folder):
                if is_part_of_message(name):
                    os.unlink(name, dir_fd=folder)
        with self._held.inside(path.parent) as parent:
            try:
                os.rmdir(path.name, dir_fd=parent)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise


def deliver_all(folders: Iterable[RunFolder], *, seconds: float = 2.0) -> Delivered:
    """Send what waits in run folders, taking `seconds` at most (and a second for what hangs in spite of that).

    Only the run's owner sends. Never raises: what does not go out now waits for the next time.
    """
    end = time.monotonic() + seconds
    found = Delivered()
    for folder in folders:
        for box, record in _boxes(folder):
            ...
    return found
