"""Curves of metrics.jsonl: a few hundred points, which keep the least and the greatest value of all lines."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from slurmddp.records.json_lines import LONGEST
from slurmddp.shared.files import open_plain

#: Points of a curve, at most: the file is read in so many pieces.
_POINTS = 400
_HUGE = 1e12
_NUMBER = rb"(-?[0-9][-+.0-9eE]{0,30})[,}]"
_STEP = re.compile(rb'"step": ?([0-9]{1,15})[,}]')


class Point(NamedTuple):
    """The values of neighbouring lines. step: that of the last of them."""

    step: int
    low: float
    mean: float
    high: float


def read_curves(path: Path, keys: Sequence[str]) -> Mapping[str, Sequence[Point]]:
    """Return the curve of each key over the steps. Where steps were trained again, the later lines count.

    A pattern finds the values of all lines: to parse a million lines takes too long. Raises OSError.
    """
    patterns = {key: re.compile(b'"%b": ?%b' % (re.escape(key.encode()), _NUMBER)) for key in keys}
    curves: dict[str, list[Point]] = {key: [] for key in keys}
    try:
        file = open_plain(path, path.parent)
    except FileNotFoundError:
        return curves
    with file:
        size = os.fstat(file.fileno()).st_size // _POINTS + 1
        while piece := file.read(size):
            piece += file.readline(LONGEST)
            piece = piece[: piece.rfind(b"\n") + 1]  # a last line that is not whole yet is left out
            first, last = _STEP.search(piece), _STEP.search(piece, max(piece.rfind(b'"step":'), 0))
            if first is None or last is None:
                continue
            for key, curve in curves.items():
                while curve and curve[-1].step >= int(first[1]):
                    curve.pop()
                if values := _numbers(patterns[key].findall(piece)):
                    curve.append(Point(int(last[1]), min(values), sum(values) / len(values), max(values)))
    return curves


def _numbers(found: Sequence[bytes]) -> list[float]:
    try:
        return [value for value in map(float, found) if abs(value) < _HUGE]
    except ValueError:  # of a damaged line
        return []
