"""The logs of a run, as they grow."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from slurmddp.runs.layout import RunFolder
from slurmddp.shared.files import open_plain


class Follower:
    """New lines of the batch log and of every node's log, as bytes, in the order in which they are found.

    A line of a node is prefixed with the node's name where more than one node has a log. A line without its
    end yet is kept back until it is whole.
    """

    def __init__(self, folder: RunFolder, *, node: str | None = None, attempt: int | None = None) -> None:
        self.folder = folder
        self.node = node
        self.attempt = attempt
        self._offsets: dict[Path, int] = {}

    def new_lines(self, *, to_the_end: bool = False) -> Iterator[bytes]:
        """Yield all lines since the last call; `to_the_end` gives an unfinished last line, too."""
        if self.node is None:
            yield from self._lines(self.folder.job_log, to_the_end)
        logs = self.node_logs()
        many = len({path.name for path in logs}) > 1
        for path in logs:
            for line in self._lines(path, to_the_end):
                yield os.fsencode(path.stem) + b": " + line if many else line

    def node_logs(self) -> list[Path]:
        """Return the nodes' logs of the attempts that are followed, oldest attempt first."""
        pattern = "attempt-*" if self.attempt is None else self.folder.attempt_logs(self.attempt).name
        logs = sorted(self.folder.logs.glob(f"{pattern}/*.log"))
        return [path for path in logs if not path.name.startswith("nccl.") and self.node in (None, path.stem)]

    def _lines(self, path: Path, to_the_end: bool) -> Iterator[bytes]:
        """One after the other, so that a log of many GB needs no memory."""
        try:
            handle = open_plain(path)
        except FileNotFoundError:
            return
        with handle:
            end = os.fstat(handle.fileno()).st_size  # what is written meanwhile comes the next time
            start = handle.seek(self._offsets.get(path, 0))
            while start < end and (line := handle.readline(end - start)):
                if not (to_the_end or line.endswith(b"\n")):
                    return
                start += len(line)
                self._offsets[path] = start
                yield line.removesuffix(b"\n")
