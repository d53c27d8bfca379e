"""metrics.jsonl of any length: its newest lines, lines spread over it, and all of it condensed."""

from __future__ import annotations

import json
import os
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from slurmddp.runs.events import LONGEST, read_lines, record_of
from slurmddp.runs.evidence import whole
from slurmddp.runs.rank_starts import GAP, cost_of
from slurmddp.runs.timeline import Mark, number
from slurmddp.shared.files import bounded_lines, open_plain

#: Files of this size are read whole: all figures are exact then.
SMALL = 2**21
#: Bytes that are read from the end, and to find a line somewhere in the file.
_TAIL, _LOOK = 2**16, 2**12
#: Lines that stand for a large file.
_POINTS = 256
_LOOKS = 4 * _POINTS
_CHUNK = 2**20
_BATCH = 500
_HUGE = 1e12
#: Without blank lines, of which there may be millions.
_LINE = re.compile(rb"[^\n]+\n")
#: Keys of a line that the ledger reads.
_KEPT = ("time", "attempt", "step", "seconds", "rank")
#: Events after which the lines belong to another start of the ranks, or may.
_PARTING = frozenset({"rank_started", "started", "ready", "resumed", "first_step", "error", "hang", "finished"})
#: Parts of a line that come from single events, not from every step.
_SINGLE = ("checkpoint", "evaluation", "preflight")

Record = dict[str, Any]


class _Line(NamedTuple):
    """A line: its bytes' begin and end in the file, its record, and the record of the line before it if known."""

    begin: int
    end: int
    record: Record
    before: Record | None


def tail(path: Path, length: int = _TAIL, below: Path | None = None) -> list[Record]:
    """Return the newest lines, in the file's order: at least one if there is one. Raises OSError.

    length: how many bytes at the file's end are read, if they hold a line. below: the run folder, if the file does not
    lie in it directly.
    """
    try:
        file = open_plain(path, below or path.parent)
    except FileNotFoundError:
        return []
    with file:
        size = os.fstat(file.fileno()).st_size
        while True:
            begin = max(size - length, 0)
            found = [line.record for line in _lines(file, begin, size, whole=begin == 0)]
            if found or begin == 0 or length > 4 * LONGEST:
                return found
            length *= 8


def behind(path: Path, offset: int) -> Iterator[tuple[list[Record], int]]:
    """Yield the whole lines behind a byte, up to `_BATCH` at once, and the byte behind them. Raises OSError."""
    try:
        file = open_plain(path, path.parent)
    except FileNotFoundError:
        return
    with file:
        file.seek(offset)
        rows: list[Record] = []
        for line in bounded_lines(file, LONGEST):
            if not line.endswith(b"\n"):
                break
            offset = file.tell()
            if (record := record_of(line)) is not None:
                rows.append(record)
            if len(rows) == _BATCH:
                yield rows, offset
                rows = []
        yield rows, offset


def is_small(path: Path) -> bool:
    """Return whether the file is absent, or short enough to be read whole. Raises OSError."""
    try:
        return path.stat().st_size <= SMALL
    except FileNotFoundError:
        return True


def read(path: Path, events: Sequence[Mapping[str, Any]], *, quick: bool) -> tuple[list[Record], bool]:
    """Return lines for the ledger, and whether they stand for all lines exactly. quick: read some of a long file only.

    Raises OSError.
    """
    if is_small(path):
        return list(read_lines(path, path.parent).records), True
    return (estimated(path, events), False) if quick else (condensed(path, events), True)


def spread(path: Path, events: Sequence[Mapping[str, Any]] = ()) -> list[Record]:
    """Return all lines of a small file, else lines evenly spread over it, the first and the last of each start of the
    ranks included. Raises OSError."""
    if is_small(path):
        return list(read_lines(path, path.parent).records)
    return [line.record for line in _sample(path, _Groups(events))]


def estimated(path: Path, events: Sequence[Mapping[str, Any]]) -> list[Record]:
    """Return lines for the ledger: those of `spread`, each with `seconds` that stand for the lines left out before it.

    What single events took comes from the events, the rest from the shares of the line itself. Raises OSError.
    """
    found = _sample(path, _Groups(events))
    stalls = [(at, cost) for event in events if (cost := _stall(event)) and (at := number(event.get("time")))]
    rows = [line.record for line in found[:1]]
    used = 0
    for before, line in pairwise(found):
        end = number(line.record.get("time")) or 0.0
        between: dict[str, float] = {}
        while used < len(stalls) and stalls[used][0] <= end:
            for kind, seconds in stalls[used][1].items():
                between[kind] = between.get(kind, 0.0) + seconds
            used += 1
        rows.append(line.record if before.end == line.begin else _stands_for(before.record, line, between))
    return rows


def condensed(path: Path, events: Sequence[Mapping[str, Any]]) -> list[Record]:
    """Return all lines for the ledger, read in one pass and in little memory.

    Neighbours become one line with the sums of their `seconds`. Lines at a checkpoint's step, and those at the begin of
    a start of the ranks, stay as they are. Raises OSError.
    """
    steps = {whole(event.get("step")) for event in events if event.get("event") in ("resumed", "checkpoint_saved")}
    merger = _Merger(_Groups(events), sorted(step for step in steps if step is not None))
    with open_plain(path, path.parent) as file:
        for record in records(file):
            merger.add(record)
    return merger.rows


class _Groups:
    """Tells which lines belong to one stretch between two events of rank 0."""

    def __init__(self, events: Iterable[Mapping[str, Any]]) -> None:
        times = (
            number(event.get("time"))
            for event in events
            if event.get("event") in _PARTING and (event.get("rank", 0) == 0 or event.get("event") == "hang")
        )
        self._cuts = sorted(time for time in times if time is not None)

    def of(self, record: Mapping[str, Any]) -> tuple[Any, int]:
        time = number(record.get("time"))
        return record.get("attempt"), -1 if time is None else bisect_left(self._cuts, time)

    def until(self, record: Mapping[str, Any]) -> float:
        """Return the time up to which lines of this attempt are in the record's group."""
        index = self.of(record)[1]
        return self._cuts[index] if 0 <= index < len(self._cuts) else _HUGE


# --- lines spread over the file


def _sample(path: Path, groups: _Groups) -> list[_Line]:
    try:
        file = open_plain(path, path.parent)
    except FileNotFoundError:
        return []
    with file:
        size = os.fstat(file.fileno()).st_size
        first = _lines(file, 0, min(_LOOK * 16, size), whole=True)[:1]
        last = _lines(file, max(size - _TAIL, 0), size)[-1:]
        points = (_line_at(file, size * point // _POINTS, size) for point in range(1, _POINTS))
        found = [*first, *takewhile(bool, points), *last]  # where one finds nothing, the next ones would search in vain
        borders = _Borders(file, groups)
        lines: list[_Line] = []
        for line in found:
            if line is not None and (not lines or line.begin >= lines[-1].end):
                lines += [*borders.between(lines[-1], line), line] if lines else [line]
        return lines


class _Borders:
    """Finds the lines where one group ends and the next begins, in so many looks at most: lines with times in no order
    would otherwise lead to the whole file."""

    def __init__(self, file: BinaryIO, groups: _Groups) -> None:
        self._file, self._groups, self._left = file, groups, _LOOKS

    def between(self, low: _Line, high: _Line) -> list[_Line]:
        if self._left <= 0 or low.end >= high.begin or self._groups.of(low.record) == self._groups.of(high.record):
            return []
        self._left -= 1
        if high.begin - low.end <= 4 * _LOOK:
            return _lines(self._file, low.end, high.begin, whole=True)
        middle = _line_at(self._file, (low.end + high.begin) // 2, high.begin)
        if middle is None:
            return []
        return [*self.between(low, middle), middle, *self.between(middle, high)]


def _line_at(file: BinaryIO, begin: int, end: int) -> _Line | None:
    """Return the second whole line at or behind a byte, so that the one before it is known; None up to `end`."""
    length = _LOOK
    while True:
        found = _lines(file, begin, min(begin + length, end))
        if len(found) > 1:
            return found[1]
        if begin + length >= end or length > 4 * LONGEST:
            return None
        length *= 8


def _lines(file: BinaryIO, begin: int, end: int, *, whole: bool = False) -> list[_Line]:
    """Return the sound lines within these bytes. whole: a line begins at `begin`; else the first is a rest of one."""
    file.seek(begin)
    data = file.read(end - begin)
    lines: list[_Line] = []
    at = 0 if whole else data.find(b"\n") + 1
    if not whole and not at:
        return []
    before: Record | None = None
    for line in _LINE.finditer(data, at, data.rfind(b"\n") + 1):
        if (record := record_of(line[0])) is not None:
            lines.append(_Line(begin + line.start(), begin + line.end(), record, before))
            before = record
    return lines


def _stall(event: Mapping[str, Any]) -> dict[str, float]:
    """Seconds that training stood still for an event of rank 0."""
    if event.get("rank", 0) != 0:
        return {}
    return {kind: cost / 1000 for kind, cost in cost_of(Mark(0, str(event.get("event")), event)).items()}


def _stands_for(before: Record, line: _Line, stalls: Mapping[str, float]) -> Record:
    """Return a line's record for all the time since `before`. Without `seconds` of its own the events tell."""
    parts = _seconds(line.record)
    times = [number(record.get("time")) for record in (before, line.before or before, line.record)]
    begin, previous, end = times
    if not parts or begin is None or previous is None or end is None:
        return line.record
    own = max(end - previous, 0.0)
    steady = {name: seconds for name, seconds in parts.items() if name not in _SINGLE}
    told = own - sum(parts.values()) + sum(steady.values())
    rest = max(end - begin - sum(stalls.values()), 0.0)
    factor = rest / max(told, sum(steady.values()), 1e-6)
    return {
        **{name: line.record[name] for name in ("time", "attempt", "step") if name in line.record},
        "seconds": {**{name: seconds * factor for name, seconds in steady.items()}, **stalls},
        GAP: own,
    }


# --- the whole file


def records(file: BinaryIO) -> Iterator[Record]:
    """Yield the sound records, many lines parsed at once."""
    rest = b""
    while chunk := file.read(_CHUNK):
        *lines, rest = (rest + chunk).split(b"\n")
        rest = rest[: LONGEST + 1]
        try:
            found = json.loads(b"[" + b",".join(lines) + b"]")
        except (ValueError, RecursionError):
            found = []
        if len(found) != len(lines) or not all(type(record) is dict for record in found):
            found = [record for line in lines if (record := record_of(line)) is not None]
        yield from found


class _Merger:
    """Merges neighbouring lines. steps: where checkpoints lie, at which lines stay apart."""

    def __init__(self, groups: _Groups, steps: Sequence[int]) -> None:
        self._groups, self._steps = groups, steps
        self.rows: list[Record] = []
        self._open: Record | None = None  # into which the next lines may go
        self._until, self._next = 0.0, 0

    def add(self, record: Record) -> None:
        """Take the next line of the file."""
        time: Any = record.get("time")
        step, seconds = record.get("step"), record.get("seconds")
        row = self._open
        if (
            row is None
            or type(time) not in (float, int)
            or type(step) is not int
            or type(seconds) is not dict
            or record.get("attempt") != row["attempt"]
            or not row["time"] <= time <= self._until
            or not row["step"] <= step < self._next
            or "rank" in record
        ):
            self._begin(record, time, step, seconds)
            return
        if row is not self.rows[-1]:
            self.rows.append(row)
        parts = row["seconds"]
        for name, value in seconds.items():
            if type(value) in (float, int) and 0 < value < _HUGE:
                parts[name] = parts.get(name, 0.0) + value
        row[GAP] = max(row[GAP], time - row["time"])
        row["time"], row["step"] = time, step

    def _begin(self, record: Record, time: Any, step: Any, seconds: Any) -> None:
        """Keep a line as it is. What follows a sound one goes into a row of its own."""
        self.rows.append({name: record[name] for name in _KEPT if name in record})
        self._open = None
        if number(time) is None or type(step) is not int or not isinstance(seconds, dict) or "rank" in record:
            return
        at = bisect_left(self._steps, step + 1)
        self._next = self._steps[at] if at < len(self._steps) else int(_HUGE)
        self._until = self._groups.until(record)
        self._open = {"time": time, "attempt": record.get("attempt"), "step": step, "seconds": {}, GAP: 0.0}


def _seconds(record: Record) -> dict[str, float]:
    """The sound parts of a line's `seconds`."""
    sums = record.get("seconds")
    found = {name: number(value) for name, value in sums.items()} if isinstance(sums, dict) else {}
    return {name: value for name, value in found.items() if value is not None and value > 0}
