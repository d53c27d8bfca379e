"""`status --watch`: curves of loss and throughput, and one line for a reader that is no terminal."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from slurmddp.records.metrics import Metrics
from slurmddp.records.values import number
from slurmddp.report.progress import steps_text
from slurmddp.report.status import RunStatus
from slurmddp.run.metrics import spread
from slurmddp.shared.units import short
from slurmddp.visible import one_line

_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH = 50


def curves(found: RunStatus) -> list[str]:
    """Return a line each for loss and throughput over the steps of the whole run. Raises OSError."""
    rows = spread(found.folder.metrics)
    speed = next(iter(found.progress.speed), None)
    lines = []
    for title, key, low in (("loss", "loss", None), ("speed", f"{speed}_per_second", 0.0)):
        values = by_step(rows, key)
        if len(values) > 1:
            lines.append(f"{title:<8} {sparkline(values, _WIDTH, low)}  {short(values[0])} to {short(values[-1])}")
    return lines


def by_step(rows: Sequence[Metrics], key: str) -> list[float]:
    """Return the values in the order of their steps; the last line of a step counts."""
    found: dict[int, float] = {}
    for row in rows:
        if (value := number(row.figures.get(key))) is not None:
            found[row.step] = value
    return [found[step] for step in sorted(found)]


def sparkline(values: Sequence[float], width: int, low: float | None = None) -> str:
    """Return at most `width` blocks, each the mean of its share of the values. low: of the lowest block, else the least
    of them."""
    count = min(width, len(values))
    means = []
    for index in range(count):
        part = values[index * len(values) // count : (index + 1) * len(values) // count]
        means.append(sum(part) / len(part))
    low, high = min(means) if low is None else low, max(means)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[max(round((mean - low) * scale), 0)] for mean in means)


def watch_line(found: RunStatus) -> str:
    """Return the status as one line, without the time."""
    progress = found.progress
    parts = [found.state.line]
    if progress.step is not None:
        parts.append(f"step {steps_text(progress.step, progress.steps)}")
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.4g}")
    parts += [f"{short(value)} {unit}/s" for unit, value in list(progress.speed.items())[:1] if found.state.going]
    return one_line(", ".join(parts))


def clock_time() -> str:
    """Return the time of day."""
    return datetime.now().strftime("%H:%M:%S")
