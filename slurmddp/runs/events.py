"""events.jsonl and metrics.jsonl: JSON lines that the job's processes append and everybody reads."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Lines:
    """Records of a JSON lines file, in the file's order.

    damaged: how many lines were no JSON object. A last line without its newline is being written, or was cut
    by the end of its writer: it is left out and not counted.
    """

    records: tuple[dict[str, Any], ...]
    damaged: int = 0


def read_lines(path: Path) -> Lines:
    """Read a JSON lines file; an absent one is empty. Raises OSError if it cannot be read."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return Lines(())
    records: list[dict[str, Any]] = []
    damaged = 0
    *whole, _torn = raw.split(b"\n")
    for line in whole:
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:  # UnicodeDecodeError and JSONDecodeError; counted, and the reader says so
            damaged += 1
            continue
        if isinstance(record, dict):
            records.append(record)
        else:
            damaged += 1
    return Lines(tuple(records), damaged)


def append_event(path: Path, event: str, **fields: Any) -> None:
    """Append one event with its time (unix seconds, as the runtime writes them). Raises OSError."""
    append_line(path, {"time": round(time.time(), 3), "event": event, **fields})


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Append one JSON object with a single write, so that lines of several processes do not mix.

    POSIX promises that for O_APPEND on one host; on NFS two hosts that append at the same moment may
    overwrite each other, which is why each file has few writers. A last line that was cut is closed first.
    Raises OSError.
    """
    line = (json.dumps(record, ensure_ascii=False) + "\n").encode("utf-8", errors="surrogateescape")
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line
        written = os.write(descriptor, line)
        if written != len(line):
            raise OSError(f"{path}: only {written} of {len(line)} bytes were written (is the disk full?)")
    finally:
        os.close(descriptor)
