"""The logs of a run, as they grow."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from slurmddp.run.layout import RunFolder
from slurmddp.shared.files import open_plain

#: A line that names its rank: torch's tracebacks (`[rank3]: ...`), and torchrun's `--tee` (`[default3]:...`).
_OF_RANK = re.compile(rb"\[(?:rank|default)([0-9]{1,9})\]:")
_BLOCK = 2**16
#: Bytes of a line that are given at once: a longer one comes in pieces.
_LONGEST = 2**20


class Follower:
    """New lines of the batch log and of every node's log, as bytes, in the order in which they are found.

    A line of a node is prefixed with the node's name where more than one node has a log. Where more than one attempt
    has logs, a line names the attempt of those that follow. A line without its end yet is kept back until it is whole.
    rank: lines that name another rank are left out. tail: how many of the lines that each log has already are given.
    as_json: each line is a JSON object instead, with attempt and node (null: job.sh's log).
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        node: str | None = None,
        attempt: int | None = None,
        rank: int | None = None,
        tail: int | None = None,
        as_json: bool = False,
    ) -> None:
        self.folder = folder
        self._as_json = as_json
        self.node, self.attempt = node, attempt
        self._rank, self._tail = rank, tail
        self._offsets: dict[Path, int] = {}
        self._labelled: int | None = None

    def new_lines(self, *, to_the_end: bool = False) -> Iterator[bytes]:
        """Yield all lines since the last call; `to_the_end` gives an unfinished last line, too."""
        if self.node is None:
            for line in self._lines(self.folder.job_log, to_the_end):
                yield _json(None, None, line) if self._as_json else line
        logs = self.node_logs()
        many = len({path.name for path in logs}) > 1
        several = len({path.parent for path in logs}) > 1
        for path in logs:
            attempt = _attempt(path.parent)
            for line in self._lines(path, to_the_end):
                if self._as_json:
                    yield _json(attempt, path.stem, line)
                    continue
                if several and attempt != self._labelled:
                    yield f"==> attempt {attempt} <==".encode()
                self._labelled = attempt
                yield os.fsencode(path.stem) + b": " + line if many else line
        self._tail = None  # of a log that begins now, all lines are new

    def attempts(self) -> list[int]:
        found = (_attempt(path) for path in self.folder.logs.glob("attempt-*"))
        return sorted(attempt for attempt in found if attempt is not None)

    def node_logs(self) -> list[Path]:
        """Return the nodes' logs of the attempts that are followed, oldest attempt first."""
        pattern = "attempt-*" if self.attempt is None else self.folder.attempt_logs(self.attempt).name
        logs = sorted(self.folder.logs.glob(f"{pattern}/*.log"))
        return [path for path in logs if not path.name.startswith("nccl.") and self.node in (None, path.stem)]

    def _lines(self, path: Path, to_the_end: bool) -> Iterator[bytes]:
        """One after the other, so that a log of many GB needs no memory."""
        try:
            handle = open_plain(path, self.folder.path)
        except FileNotFoundError:
            return
        with handle:
            end = os.fstat(handle.fileno()).st_size  # what is written meanwhile comes the next time
            if path not in self._offsets and self._tail is not None:
                self._offsets[path] = _begin_of_last(handle.fileno(), end, self._tail)
            start = handle.seek(self._offsets.get(path, 0))
            while start < end and (line := handle.readline(min(end - start, _LONGEST))):
                if not (to_the_end or len(line) == _LONGEST or line.endswith(b"\n")):
                    return
                start += len(line)
                self._offsets[path] = start
                if self._rank is None or _may_be_of(line, self._rank):
                    yield line.removesuffix(b"\n")


def _attempt(folder: Path) -> int | None:
    """2 for attempt-002."""
    number = folder.name.removeprefix("attempt-")
    return int(number) if number.isdecimal() else None


def _json(attempt: int | None, node: str | None, line: bytes) -> bytes:
    told = {"attempt": attempt, "node": node, "line": line.decode("utf-8", errors="replace")}
    return json.dumps(told).encode()


def _may_be_of(line: bytes, rank: int) -> bool:
    found = _OF_RANK.match(line)
    return found is None or int(found[1]) == rank


def _begin_of_last(descriptor: int, end: int, count: int) -> int:
    """Return where the last `count` lines of a file begin, read from its end."""
    if count == 0:
        return end
    missing = count + 1  # the newline before the first of them counts, too
    at, last = end, True
    while at > 0:
        begin = max(at - _BLOCK, 0)
        data = os.pread(descriptor, at - begin, begin)
        if last and not data.endswith(b"\n"):
            missing -= 1  # a last line without its end
        last = False
        found = len(data)
        while (found := data.rfind(b"\n", 0, found)) >= 0:
            missing -= 1
            if missing == 0:
                return begin + found + 1
        at = begin
    return 0
