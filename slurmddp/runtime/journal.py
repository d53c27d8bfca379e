"""Append-only JSON lines that many ranks and attempts may write to at once."""

import contextlib
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any


class JsonLines:
    """A file of JSON objects, one a line.

    Each line is one os.write on a descriptor opened with O_APPEND: lines of several processes never mix
    (POSIX promises it on one host; on NFS two hosts that append at the same moment may overwrite each other,
    which is why each file has few writers).
    """

    def __init__(self, path: Path) -> None:
        """Makes the file where there is none. Raises OSError, also where its folder is missing."""
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        size = os.fstat(self._descriptor).st_size
        # A line that was cut, by the end of its writer or by a full disk, must not take the next one with it.
        self._cut = size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one object. Numbers that JSON lacks (nan, inf) are written as null; names of files that are no UTF-8
        as the bytes that they are. Raises OSError.
        """
        text = json.dumps(_finite(record), ensure_ascii=False, allow_nan=False) + "\n"
        line = text.encode(errors="surrogateescape")
        if self._cut:
            line = b"\n" + line
        written = os.write(self._descriptor, line)
        self._cut = written != len(line)
        if self._cut:
            raise OSError(f"{self.path}: only {written} of {len(line)} bytes were written (is the disk full?)")

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._descriptor)

    def __enter__(self) -> "JsonLines":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Journal:
    """JsonLines that never end a run: where a line cannot be written, stderr says so, once until writing works again.

    The next line that can be written has `lines_lost`, how many are missing before it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: JsonLines | None = None
        self._lost = 0

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one object, as JsonLines does."""
        try:
            if self._lines is None:
                self._lines = JsonLines(self.path)
            self._lines.write({**record, "lines_lost": self._lost} if self._lost else record)
            self._lost = 0
        except OSError as error:
            if not self._lost:
                from slurmddp.runtime.watch.ending import say  # the login side, which reads this module, needs it not

                say(f"warning: {self.path.name} cannot be written ({error.strerror or error}): training continues\n")
            self._lost += 1


class Events:
    """events.jsonl as one rank of one attempt writes it, or a node's torchrun agent (rank None)."""

    def __init__(self, path: Path, *, attempt: int, node: str, rank: int | None) -> None:
        self._lines = Journal(path)
        self._who = {"attempt": attempt, "node": node} | ({} if rank is None else {"rank": rank})
        self._since = round(time.time(), 3)

    def write(self, event: str, **facts: Any) -> None:
        """Append one event with time (unix seconds), attempt, node and, if known, rank. Raises nothing, see Journal."""
        self._lines.write({"time": round(time.time(), 3), "event": event, **self._who, **facts})

    def told(self, event: str) -> bool:
        """Whether any rank of this attempt has written such an event since this one began."""
        try:
            text = self._lines.path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return False
        for line in text.splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError):  # Another's line may be cut.
                found = json.loads(line)
                if (found["event"], found["attempt"]) == (event, self._who["attempt"]) and found["time"] >= self._since:
                    return True
        return False


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
