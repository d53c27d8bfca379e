"""One start of the ranks: what rank 0 told of it, and what that says about its time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from slurmddp.records.values import number, whole
from slurmddp.runs.timeline import LINE, Mark

#: Parts of a metrics line's `seconds` -> kind. A part that is not known here is "other".
_PARTS = {
    "data": "data", "checkpoint": "checkpoint", "evaluation": "evaluation", "preflight": "preflight",
    "forward": "training", "backward": "training", "overlap": "training", "optimizer": "training",
    "network": "network",
    "compute": "training", "unmeasured": "run",  # of a script of the user's own
}  # fmt: skip
FAILURES = ("error", "hang")
#: What `restarted` says of a start of a script of the user's own.
WENT_ON, FROM_ZERO, UNKNOWN = "went on", "from zero", "unknown"
#: Events of rank 0 that tell that it was training.
TRAINING = frozenset({LINE, "first_step", "checkpoint_saved", "evaluated", "stopping", "finished"})
#: Events that tell how long training had stood still for them.
_COSTS = {"checkpoint_saved": "checkpoint", "evaluated": "evaluation", "preflight": "preflight"}


@dataclass(frozen=True)
class Stretch:
    """Time between two metrics lines: the steps in it, and milliseconds of their training and of its waits."""

    begin_step: int
    end_step: int
    spent: Mapping[str, int]


@dataclass
class RankStart:
    """One start of the ranks: what rank 0 told, and what was found out of it.

    ended_by: what ended it from outside (cancelled, time limit, preemption): that is no failure of it.
    """

    marks: list[Mark]
    finished: bool = False
    alive: bool = False
    ended_by: str = ""
    stretches: list[Stretch] = field(default_factory=list)

    @property
    def resumed(self) -> int | None:
        """The step that this start began after, 0 if that is unknown; None if it did not come so far."""
        for event, before in (("resumed", 0), ("ready", 0), ("restarted", 1), ("first_step", 1), (LINE, 1)):
            if event == "first_step" and self.how == UNKNOWN:
                return 0
            steps = (whole(mark.facts.get("step")) for mark in self.marks if mark.event == event)
            step = next((step for step in steps if step is not None), None)
            if step is not None:
                return step - before
        return None

    @property
    def how(self) -> str | None:
        """What a script of the user's own began from, if its ranks saw that; the newest word counts."""
        if any(mark.event == "resumed" for mark in self.marks):
            return WENT_ON
        told = [str(mark.facts.get("how")) for mark in self.marks if mark.event == "restarted"]
        return told[-1] if told else None

    @property
    def failed(self) -> bool:
        """Return whether rank 0 told of an error, or of a hang that it ended."""
        return any(mark.event in FAILURES for mark in self.marks)

    @property
    def died(self) -> bool:
        """Return whether it neither finished, nor runs, nor was ended from outside."""
        return not (self.finished or self.alive or self.ended_by)

    @property
    def reached(self) -> int | None:
        """The highest step that rank 0 told of."""
        steps = (whole(mark.facts.get("step")) for mark in self.marks if mark.event in TRAINING)
        return max((step for step in steps if step is not None), default=None)

    @property
    def saved(self) -> list[int]:
        """Steps of its checkpoints."""
        saves = (mark.facts.get("step") for mark in self.marks if mark.event == "checkpoint_saved")
        return [step for save in saves if (step := whole(save)) is not None]


def split(marks: Iterable[Mark]) -> list[list[Mark]]:
    """Return the marks of each start of the ranks. In a run of older code, only `started` tells of one."""
    starts: list[list[Mark]] = []
    told = False  # whether the newest of them has its `started`
    for mark in marks:
        if not starts or mark.event == "rank_started" or (mark.event == "started" and told):
            starts.append([])
            told = False
        starts[-1].append(mark)
        told = told or mark.event == "started"
    return starts


def process_start(start: RankStart) -> int | None:
    """Return when the ranks' processes started; None if nothing tells.

    `seconds` is how long before the event that was. In a run of older code only the first step has it, counted from
    somewhat later than the process's start, perhaps even after the event before.
    """
    for mark in start.marks:
        if mark.event in ("rank_started", "first_step"):
            seconds = number(mark.facts.get("seconds"))
            begin = mark.at - round(max(seconds or 0, 0) * 1000)
            return begin if mark.event == "rank_started" or begin < start.marks[0].at else None
    return None


def cost_of(mark: Mark) -> dict[str, float]:
    """Milliseconds that training stood still for what an event tells of: its `stall`, else its `seconds`."""
    kind = _COSTS.get(mark.event)
    seconds = number(mark.facts.get("stall", mark.facts.get("seconds"))) if kind else None
    return {kind: seconds * 1000} if kind and seconds and seconds > 0 else {}


def parts_of(mark: Mark) -> dict[str, float]:
    """Milliseconds by kind, from a line's `seconds`; empty if it has none."""
    sums = mark.facts.get("seconds")
    parts: dict[str, float] = {}
    for name, value in sums.items() if isinstance(sums, Mapping) else ():
        seconds, kind = number(value), _PARTS.get(name, "other")
        if seconds is not None and seconds > 0:
            parts[kind] = parts.get(kind, 0) + seconds * 1000
    return parts
