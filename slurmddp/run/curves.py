"""Curves of metrics.jsonl: a few hundred points, which keep the least and the greatest value of all lines."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from pydantic_core import from_json

from slurmddp.records.json_lines import LONGEST
from slurmddp.records.metrics import read_figures
from slurmddp.shared.files import bounded_lines, open_plain

#: Points of a curve, at most: so many pieces of the file are one point each.
_POINTS = 400
#: A line: its step, and the figure of each key.
_Row = tuple[int, list[float | None]]


class Point(NamedTuple):
    """The values of neighbouring lines. step: that of the last of them."""

    step: int
    low: float
    mean: float
    high: float


def read_curves(path: Path, keys: Sequence[str]) -> Mapping[str, Sequence[Point]]:
    """Return the curve of each key over the steps. Where steps were trained again, the later lines count.

    Raises OSError.
    """
    curves: dict[str, list[Point]] = {key: [] for key in keys}
    try:
        file = open_plain(path, path.parent)
    except FileNotFoundError:
        return curves
    with file:
        for rows in _pieces(file, keys):
            steps, columns = [step for step, _ in rows], zip(*(figures for _, figures in rows), strict=True)
            for curve, column in zip(curves.values(), columns, strict=True):
                while curve and curve[-1].step >= steps[0]:
                    curve.pop()
                if values := [value for value in column if value is not None]:
                    curve.append(Point(steps[-1], min(values), sum(values) / len(values), max(values)))
    return curves


def _pieces(file: BinaryIO, keys: Sequence[str]) -> Iterator[list[_Row]]:
    """Yield the sound lines of each piece of a file; pieces without one are left out."""
    size = os.fstat(file.fileno()).st_size // _POINTS + 1
    read = 0
    rows: list[_Row] = []
    for line in bounded_lines(file, LONGEST):
        read += len(line)
        if line.endswith(b"\n") and (row := _row(line, keys)):  # a last line that is not whole yet is left out
            rows.append(row)
        if read >= size:
            if rows:
                yield rows
            read, rows = 0, []
    if rows:
        yield rows


def _row(line: bytes, keys: Sequence[str]) -> _Row | None:
    """json takes five times as long for a million lines."""
    try:
        record = from_json(line)
    except ValueError:
        return None
    return read_figures(record, keys) if isinstance(record, dict) else None
