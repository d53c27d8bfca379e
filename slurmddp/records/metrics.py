"""A line of metrics.jsonl."""

from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from slurmddp.records.values import number, whole

#: docs/files.md says when it rises.
VERSION = 2
_OWN = frozenset(("time", "attempt", "step", "start", "seconds"))


class Metrics(NamedTuple):
    """What rank 0 measured up to a step. A line that the user's own script wrote may have little of it."""

    step: int  # optimizer steps so far
    time: Optional[float] = None  # unix seconds
    attempt: Optional[int] = None  # of torchrun
    start: Optional[float] = None  # unix time when this start of the ranks began to train, the same in all of its lines
    seconds: Mapping[str, float] = {}  # by part, the running totals since then
    figures: Mapping[str, Any] = {}  # all other keys

    def write(self) -> Dict[str, Any]:
        """Return the line's object."""
        time, start = (None if at is None else round(at, 3) for at in (self.time, self.start))
        seconds = {part: round(total, 5) for part, total in self.seconds.items()} or None
        keys = (("time", time), ("attempt", self.attempt), ("step", self.step), ("start", start), ("seconds", seconds))
        return dict({name: value for name, value in keys if value is not None}, **self.figures)

    @property
    def of_ranks(self) -> bool:
        """Return whether slurmddp wrote it, and not the user's own script."""
        return self.time is not None and self.attempt is not None

    def same_start(self, other: "Metrics") -> bool:
        """Return whether both lines are of one start of the ranks."""
        return (self.attempt, self.start) == (other.attempt, other.start)

    def since(self, before: "Optional[Metrics]") -> Dict[str, float]:
        """Return the seconds by part since an earlier line. If that is of another start, or None: since the start."""
        known = before.seconds if before is not None and self.same_start(before) else {}
        spent = {part: total - known.get(part, 0.0) for part, total in self.seconds.items()}
        return {part: seconds for part, seconds in spent.items() if seconds > 0}


def read(line: Mapping[str, Any]) -> Optional[Metrics]:
    """Return what a line's object says; None without a sound step. Other parts that are not sound are left out."""
    step = whole(line.get("step"))
    if step is None:
        return None
    parts = line.get("seconds")
    totals = {part: number(total) for part, total in parts.items()} if isinstance(parts, dict) else {}
    seconds = {part: total for part, total in totals.items() if total is not None}
    figures = {name: value for name, value in line.items() if name not in _OWN}
    time, start = number(line.get("time")), number(line.get("start"))
    return Metrics(step, time, whole(line.get("attempt")), start, seconds, figures)


def read_figures(line: Mapping[str, Any], names: Sequence[str]) -> "Optional[Tuple[int, List[Optional[float]]]]":
    """Return the step and some figures of a line's object, None for a figure that it lacks; None without a sound step.

    For files of a million lines: it takes a quarter of `read`'s time.
    """
    step = whole(line.get("step"))
    return None if step is None else (step, [number(line.get(name)) for name in names])
