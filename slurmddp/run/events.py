"""events.jsonl and metrics.jsonl: JSON lines that the job's processes append and everybody reads."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

from slurmddp.records import json_lines
from slurmddp.records.events import Event, read
from slurmddp.records.json_lines import LONGEST
from slurmddp.shared.files import bounded_lines, open_plain
from slurmddp.shared.journal import JsonLines

Record = TypeVar("Record")

#: What was read last, by path: a command reads the same file several times. One of another size or time is read anew.
_KNOWN = 4
_known: dict[Path, tuple[tuple[int, ...], Lines[Any]]] = {}


@dataclass(frozen=True)
class Lines(Generic[Record]):
    """Records of a JSON lines file, in the file's order.

    damaged: how many lines were no JSON object. A last line without its newline is being written, or was cut
    by the end of its writer: it is left out and not counted.
    """

    records: tuple[Record, ...]
    damaged: int = 0


def read_events(path: Path, below: Path | None = None) -> Lines[Event]:
    """Read an events.jsonl, as `read_lines` does."""
    return _read(path, below, read)


def read_lines(path: Path, below: Path | None = None) -> Lines[dict[str, Any]]:
    """Read a JSON lines file; an absent one is empty. below: as for `open_plain`. Raises OSError."""
    return _read(path, below, lambda record: record)


def _read(path: Path, below: Path | None, make: Callable[[dict[str, Any]], Record | None]) -> Lines[Record]:
    try:
        file = open_plain(path, below)
    except FileNotFoundError:
        _known.pop(path, None)
        return Lines(())
    with file:
        facts = os.fstat(file.fileno())
        state = (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, make is read)
        if path not in _known or _known[path][0] != state:
            while len(_known) >= _KNOWN:
                _known.pop(next(iter(_known)))
            _known[path] = state, _parse(file, make)
    return _known[path][1]


def tail_records(
    path: Path, read: Callable[[dict[str, Any]], Record | None], length: int = 2**16, below: Path | None = None
) -> list[Record]:
    """Return the newest sound records, in the file's order: at least one if there is one. Raises OSError.

    read: makes a record of a line's object, or None of one that is not sound. length: how many bytes at the file's end
    are read, if they hold a record. below: the run folder, if the file does not lie in it directly.
    """
    try:
        file = open_plain(path, below or path.parent)
    except FileNotFoundError:
        return []
    with file:
        size = os.fstat(file.fileno()).st_size
        while True:
            begin = max(size - length, 0)
            file.seek(begin)
            lines = file.read(size - begin).split(b"\n")[1 if begin else 0 : -1]
            told = (record for line in lines if (record := json_lines.load(line)) is not None)
            found = [says for record in told if (says := read(record)) is not None]
            if found or begin == 0 or length > 4 * LONGEST:
                return found
            length *= 8


def _parse(file: BinaryIO, make: Callable[[dict[str, Any]], Record | None]) -> Lines[Record]:
    records: list[Record] = []
    damaged = 0
    for line in bounded_lines(file, LONGEST):
        if line == b"\n" or line.isspace():
            continue
        if not line.endswith(b"\n"):
            break
        record = json_lines.load(line)
        if record is None:
            damaged += 1
        elif (made := make(record)) is not None:
            records.append(made)
    return Lines(tuple(records), damaged)


def append_line(path: Path, record: dict[str, Any], inside: int | None = None) -> None:
    """Append one JSON object, as the runtime does: see JsonLines. inside: a descriptor of the file's folder.

    Raises OSError.
    """
    with JsonLines(path, folder=inside) as lines:
        lines.write(record)
