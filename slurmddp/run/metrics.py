"""metrics.jsonl of any length: its newest lines, its new lines, and the few that say all about a run's time."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from slurmddp.records import json_lines
from slurmddp.records.events import Event, of
from slurmddp.records.json_lines import LONGEST
from slurmddp.records.metrics import Metrics, read
from slurmddp.records.rank_events import CheckpointSaved, Resumed
from slurmddp.run.events import read_lines, tail_records
from slurmddp.shared.files import bounded_lines, open_plain

#: Files of this size are read whole.
SMALL = 2**21
#: The newest lines of each start that are read: they tell how far apart lines are.
NEWEST = 9
_BLOCK = 2**13
#: Lines that stand for the curve of a large file.
_POINTS = 256
_BATCH = 500


class _Line(NamedTuple):
    """A line: its bytes' begin and end in the file, and what it says."""

    begin: int
    end: int
    says: Metrics


def tail(path: Path) -> list[Metrics]:
    """Return the newest lines, in the file's order: at least one if there is one. Raises OSError."""
    return tail_records(path, read)


def behind(path: Path, offset: int) -> Iterator[tuple[list[Metrics], int]]:
    """Yield the whole lines behind a byte, up to `_BATCH` at once, and the byte behind them. Raises OSError."""
    try:
        file = open_plain(path, path.parent)
    except FileNotFoundError:
        return
    with file:
        rows: list[Metrics] = []
        for line in _lines(file, offset):
            rows.append(line.says)
            offset = line.end
            if len(rows) == _BATCH:
                yield rows, offset
                rows = []
        yield rows, offset


def ledger_lines(path: Path, events: Sequence[Event]) -> list[Metrics]:
    """Return the lines that say all about a run's time. Of a large file these are few: the first and the newest ones of
    each start of the ranks, and those around each step that another start went on from. Raises OSError."""
    if _is_small(path):
        return [says for says in _sound(read_lines(path, path.parent).records) if says.of_ranks]
    resumed = [facts.step for _, facts in of(events, Resumed) if facts.step is not None]
    saved = [facts.step for _, facts in of(events, CheckpointSaved) if facts.step is not None][-1:]
    with open_plain(path, path.parent) as file:
        end = os.fstat(file.fileno()).st_size
        starts: list[tuple[_Line, _Line]] = []
        first = _line_from(file, 0)
        while first:
            starts.append((first, _last(file, first, end, first.says.same_start)))
            first = _line_from(file, starts[-1][1].end)
        steps = {*resumed, *saved, *(first.says.step - 1 for first, _ in starts)}
        found: dict[int, Metrics] = {}
        for first, last in starts:
            lines = [first, *_newest(file, first, last)]
            for step in steps:
                if first.says.step <= step < last.says.step:
                    before = _last(file, first, last.end, partial(_up_to, step))
                    lines += [before, _line_from(file, before.end) or before]
            found.update((line.begin, line.says) for line in lines)
    return [found[begin] for begin in sorted(found)]


def spread(path: Path) -> list[Metrics]:
    """Return all lines of a small file, else lines evenly spread over it. Raises OSError."""
    if _is_small(path):
        return _sound(read_lines(path, path.parent).records)
    with open_plain(path, path.parent) as file:
        size = os.fstat(file.fileno()).st_size
        found = (next(_lines(file, size * point // _POINTS), None) for point in range(_POINTS))
        lines = {line.begin: line.says for line in takewhile(bool, found) if line}
    return [*lines.values(), *tail(path)[-1:]]


def _up_to(step: int, says: Metrics) -> bool:
    return says.step <= step


def _is_small(path: Path) -> bool:
    try:
        return path.stat().st_size <= SMALL
    except FileNotFoundError:
        return True


def _sound(records: Iterable[Mapping[str, Any]]) -> list[Metrics]:
    return [says for record in records if (says := read(record)) is not None]


def _lines(file: BinaryIO, begin: int) -> Iterator[_Line]:
    """Yield the sound lines from the first one on that begins at a byte or behind it."""
    file.seek(max(begin - 1, 0))
    if begin:  # the rest of the line before: its break only, if one begins here
        next(bounded_lines(file, LONGEST), b"")
    at = file.tell()
    for line in bounded_lines(file, LONGEST):
        begin, at = at, file.tell()
        if (
            line.endswith(b"\n")
            and (record := json_lines.load(line)) is not None
            and (says := read(record)) is not None
        ):
            yield _Line(begin, at, says)


def _of_ranks(file: BinaryIO, begin: int) -> Iterator[_Line]:
    return (line for line in _lines(file, begin) if line.says.of_ranks)


def _line_from(file: BinaryIO, begin: int) -> _Line | None:
    return next(_of_ranks(file, begin), None)


def _last(file: BinaryIO, first: _Line, end: int, holds: Callable[[Metrics], bool]) -> _Line:
    """Return the last line up to a byte for which something holds that does for all lines from `first` up to it."""
    last = first
    while last.end < end:
        middle = (last.end + end) // 2
        line = _line_from(file, middle)
        if line and line.begin < end and holds(line.says):
            last = line
        else:
            end = middle
    return last


def _newest(file: BinaryIO, first: _Line, last: _Line) -> list[_Line]:
    """Return at least the `NEWEST` last lines of a start, if it has so many."""
    length = _BLOCK
    while True:
        begin = max(last.end - length, first.begin)
        lines = list(takewhile(lambda line: line.begin <= last.begin, _of_ranks(file, begin)))
        if len(lines) >= NEWEST or begin == first.begin:
            return lines
        length *= 2
