"""Where the lines and bars of a report's charts are: in thousandths of the chart's width and height."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from slurmddp.run.curves import Point

#: Rows of the table below a chart, for each of its lines.
_ROWS = 8
#: A curve whose greatest value is so many times the least one gets a logarithmic axis.
_MANY = 20


class Tick(NamedTuple):
    """A mark on an axis. at: percent of the axis."""

    at: float
    text: str


class Line(NamedTuple):
    """One line of a chart. band: the area from the least to the greatest value, "" where they are the same."""

    name: str
    path: str
    band: str
    dots: bool
    rows: Sequence[Sequence[str]]


class Chart(NamedTuple):
    """A chart over the steps, or over what `axis` names. text: what it shows, for those who do not see it."""

    title: str
    lines: Sequence[Line]
    x: Sequence[Tick]
    y: Sequence[Tick]
    text: str
    axis: str


def line_chart(
    title: str, curves: Mapping[str, Sequence[Point]], *, zero: bool = False, x: str = "step"
) -> Chart | None:
    """Draw curves by their names; None if all are empty. zero: the vertical axis begins at zero. x: what `step` is.

    A curve whose name begins with "validation" gets dots: it has few points. Values of many sizes get
    a logarithmic axis.
    """
    curves = {label: curve for label, curve in curves.items() if curve}
    points = [point for curve in curves.values() for point in curve]
    if not points:
        return None
    low, high = min(point.low for point in points), max(point.high for point in points)
    log = not zero and low > 0 and high > _MANY * low
    scale = math.log10 if log else float
    bottom, top, y = _axis(scale(low), scale(high), least=1.0) if log else _axis(min(low, 0.0) if zero else low, high)
    y = [Tick(tick.at, f"{10.0 ** float(tick.text):g}") for tick in y] if log else y
    first, last = min(point.step for point in points), max(point.step for point in points)
    left, right, ticks = _axis(min(first, 0) if first < last / 4 else first, last, tight=True)

    def place(step: float, value: float) -> str:
        return f"{1000 * (step - left) / (right - left):.1f},{1000 * (top - scale(value)) / (top - bottom):.1f}"

    lines = []
    for label, curve in curves.items():
        path = " ".join(place(point.step, point.mean) for point in curve)
        band = ""
        if any(point.low < point.high for point in curve):
            upper = [place(point.step, point.high) for point in curve]
            band = " ".join([*upper, *(place(point.step, point.low) for point in reversed(curve))])
        rows = [(str(each.step), *map(figure, each[1:])) for each in curve[:: -(-len(curve) // _ROWS)]]
        dots = label.startswith("validation") or len(curve) == 1
        lines.append(Line(label, path, band, dots, rows))
    ends = "; ".join(f"{label}: {figure(each[0].mean)} to {figure(each[-1].mean)}" for label, each in curves.items())
    return Chart(
        f"{title} (logarithmic)" if log else title,
        lines,
        ticks,
        y,
        f"{x.capitalize()}s {first} to {last}, values {figure(low)} to {figure(high)}. First and last: {ends}.",
        x,
    )


def figure(value: float) -> str:
    """Return a number with four digits that count: 0.01235, 2.304, 1,048,576."""
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def _axis(low: float, high: float, *, tight: bool = False, least: float = 0.0) -> tuple[float, float, list[Tick]]:
    """Return an axis and its ticks, at round numbers. tight: it has just these ends; least: between two."""
    if high - low <= max(1e-9 * max(abs(low), abs(high)), 1e-300):
        low, high = low - (abs(low) or 1) / 10, high + (abs(high) or 1) / 10
    rough = (high - low) / 4
    unit = 10.0 ** math.floor(math.log10(rough))
    gap = max(next(unit * times for times in (1, 2, 5, 10) if unit * times >= rough), least)
    begin, end = (low, high) if tight else (math.floor(low / gap) * gap, math.ceil(high / gap) * gap)
    ticks = [count * gap for count in range(math.ceil(begin / gap - 1e-9), math.floor(end / gap + 1e-9) + 1)]
    return begin, end, [Tick(round(100 * (tick - begin) / (end - begin), 2), _tick(tick)) for tick in ticks]


def _tick(value: float) -> str:
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.4g}{letter}"
    return f"{value:.4g}"
