"""The points of a sweep: how their runs are, which to run again, and which is best."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from slurmddp.commands.runs import Row, rows_of, told_cells
from slurmddp.errors import UserError
from slurmddp.records.events import keys_of, of
from slurmddp.records.rank_events import Evaluated
from slurmddp.report.status import styled_state
from slurmddp.run.events import read_events
from slurmddp.run.layout import RunFolder
from slurmddp.run.metrics import behind
from slurmddp.run.state import EXIT_CODES
from slurmddp.run.sweeps import Sweep
from slurmddp.styled import columns, join, labelled
from slurmddp.visible import one_line

#: States of runs that `sweep rerun` submits again. Users cancel on purpose, and what was stopped can be resumed.
AGAIN = frozenset({"failed", "timed out", "node failure", "out of memory", "lost"})
_NOT_SUBMITTED = "not submitted"
#: Figures of an evaluation are events, not metrics: validation_loss is `loss` of `evaluated`.
_VALIDATION = "validation_"
_NO_METRICS = ("time", "attempt", "rank", "seconds", "step")


class PointRow(NamedTuple):
    """A point and its newest run; None before its submission."""

    name: str
    values: dict[str, str]
    row: Row | None

    @property
    def state(self) -> str:
        """The state of the run."""
        return self.row.told["state"] if self.row else _NOT_SUBMITTED

    def as_dict(self) -> dict[str, Any]:
        """Return the point for --json. The keys are stable."""
        return {"name": self.name, "values": self.values, "state": self.state, "run": self.row and self.row.told}


class Ranked(NamedTuple):
    """A point's best value of a metric, and at which step it was."""

    point: PointRow
    value: float
    step: int | None


def point_rows(sweep: Sweep, say: Callable[[str], None]) -> list[PointRow]:
    """Return the sweep's points, asking each scheduler once."""
    newest = sweep.newest_runs()
    rows = {row.folder.path: row for row in rows_of(list(newest.values()), say)}
    return [
        PointRow(name, dict(values), rows.get(newest[name].folder.path) if name in newest else None)
        for name, values in sweep.points.items()
    ]


def to_rerun(points: Sequence[PointRow], say: Callable[[str], None]) -> list[str]:
    """Return the names of the points that failed or were never submitted; say why others are left out."""
    for point in points:
        if point.row is not None and point.state in ("stopped", "cancelled"):
            command = "resume" if point.state == "stopped" else "rerun"
            say(f"note: {point.name} is {point.state}: `slurmddp {command} {point.row.folder.id}` continues it")
        elif point.row is not None and point.state == _NOT_SUBMITTED:
            what = f"{point.name} may be in the queue, because sbatch did not answer: check squeue"
            say(labelled("warning", f"{what}. If it is not there, remove {point.row.folder.path} and run this again"))
    return [point.name for point in points if point.state in AGAIN or point.row is None]


def exit_code(points: Sequence[PointRow]) -> int:
    """Return 3 while a point may change by itself, else 0 if all are done, else 1."""
    codes = {EXIT_CODES[point.state] for point in points}
    return 3 if 3 in codes else max(codes, default=0)


def status_text(sweep: Sweep, points: Sequence[PointRow]) -> str:
    """Return a line per point, one more for the cause of a failure, and the counts of the states."""
    now = time.time()
    rows = [("POINT", *sweep.keys, "STATE", "STEP", "TIME", "RUN")]
    for point in points:
        state, step, took, run = "", "", "", ""
        if point.row:
            cells = told_cells(point.row.told, now)
            state, step, took, run = cells.state, cells.step, cells.took, point.row.folder.id
        rows.append((*_cells(sweep, point), state or styled_state(point.state), step, took, run))
    counts = Counter(point.state for point in points)
    most = f", at most {sweep.at_most} at once" if sweep.at_most else ""
    lines = [f"sweep  {sweep.id}: {len(points)} points{most}"]
    for line, each in zip(columns(rows), (None, *points), strict=True):
        lines.append(line)
        if each and each.row and (cause := each.row.told["cause"]):
            lines.append(f"  cause: {one_line(cause)}")
    lines.append(join(", ", (f"{count} " + styled_state(state) for state, count in sorted(counts.items()))))
    if any(point.state in AGAIN or point.row is None for point in points):
        lines.append(f"to repeat the points that failed: slurmddp sweep rerun {sweep.id}")
    return join("\n", lines)


def rank(points: Sequence[PointRow], metric: str, *, largest: bool) -> list[Ranked]:
    """Return the points that have the metric, the best first. Raises UserError where none has it."""
    found, seen = [], set()
    for point in points:
        best: tuple[float, int | None] | None = None
        for name, value, step in _figures(point.row.folder) if point.row else ():
            seen.add(name)
            if name == metric and (best is None or (value > best[0] if largest else value < best[0])):
                best = value, step
        if best is not None:
            found.append(Ranked(point, *best))
    if not found:
        known = ", ".join(sorted(seen)) or "none yet"
        raise UserError(f"no point of the sweep has the metric {metric!r}", todo=f"metrics: {known}")
    return sorted(found, key=lambda ranked: ranked.value, reverse=largest)


def rank_text(sweep: Sweep, metric: str, ranked: Sequence[Ranked]) -> str:
    """Return a line per point, the best first."""
    rows = [("POINT", *sweep.keys, metric, "STEP", "STATE", "RUN")]
    for point, value, step in ranked:
        run, state = point.row.folder.id if point.row else "", styled_state(point.state)
        rows.append((*_cells(sweep, point), f"{value:.6g}", "" if step is None else str(step), state, run))
    return join("\n", columns(rows))


def _cells(sweep: Sweep, point: PointRow) -> tuple[str, ...]:
    return (one_line(point.name), *(one_line(point.values.get(key, "")) for key in sweep.keys))


def _figures(folder: RunFolder) -> Iterator[tuple[str, float, int | None]]:
    """Yield name, value and step of each finite number in the metrics, and in the evaluations."""
    for rows, _ in behind(folder.metrics, 0):
        for row in rows:
            yield from _numbers("", row.figures, row.step)
    for _, told in of(read_events(folder.events, folder.path).records, Evaluated):
        yield from _numbers(_VALIDATION, keys_of(told), told.step)


def _numbers(prefix: str, told: Mapping[str, Any], step: object) -> Iterator[tuple[str, float, int | None]]:
    for name, value in told.items():
        if type(value) in (int, float) and name not in _NO_METRICS and math.isfinite(value):
            yield prefix + name, value, step if type(step) is int else None
