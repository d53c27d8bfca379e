"""What became of a run's time: each second from submission to the end, in one of a few kinds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from typing import Any

from slurmddp.runs.evidence import Evidence, whole
from slurmddp.runs.timeline import LINE, Attempt, Mark, number, timeline

#: The kinds of time, in the order in which they are shown, and what counts as each.
KINDS = {
    "queue": "from submission to the first start of the job's script",
    "image": "from the script's start to the start of the ranks' processes: srun, container, torchrun",
    "init": "import, rendezvous, data, model, resuming",
    "preflight": "checks of the nodes before training",
    "training": "forward, backward, all-reduce, optimizer",
    "data": "stall: waiting for data",
    "checkpoint": "stall: training stood still for a checkpoint",
    "evaluation": "held-out samples",
    "lost": "lost work: steps that were trained and not resumed from",
    "restart": "from the last sign of ranks that failed, or of a job put back into the queue, to the next start",
    "run": "a script of your own, which does not tell more",
    "other": "shutdown, and what is in none of the others",
}

#: Parts of a metrics line's `seconds` -> kind. A part that is not known here is "other".
_PARTS = {
    "data": "data", "checkpoint": "checkpoint", "evaluation": "evaluation", "preflight": "preflight",
    "forward": "training", "backward": "training", "overlap": "training", "network": "training",
    "optimizer": "training",
}  # fmt: skip
_FAILURES = ("error", "hang")
#: Events that tell how long training had stood still for them.
_COSTS = {"checkpoint_saved": "checkpoint", "evaluated": "evaluation", "preflight": "preflight"}


@dataclass(frozen=True)
class Ledger:
    """The time of one run. All times are whole milliseconds, so that they add up exactly.

    begin, end     unix time of submission, and of the end (of now, while the run goes on)
    spent          kind -> milliseconds, for every one of KINDS; their sum is end - begin
    attempts       starts of the job's script
    launches       starts of the ranks, which torchrun repeats inside an attempt
    failures       launches that did not end by themselves (they failed, or were killed)
    """

    begin: int
    end: int
    spent: Mapping[str, int]
    attempts: int
    launches: int
    failures: int

    @property
    def wall(self) -> int:
        """Milliseconds from begin to end."""
        return self.end - self.begin

    @property
    def goodput(self) -> float | None:
        """Training's share of the time, from 0 to 1. None without any time, and for a script that tells nothing."""
        return self.spent["training"] / self.wall if self.wall and not self.spent["run"] else None


def ledger(facts: Evidence, rows: Sequence[Mapping[str, Any]], *, script: bool, now: float | None) -> Ledger | None:
    """Account for a run's time. Pure; None for a run that was never submitted and never began.

    rows: the lines of metrics.jsonl; script: whether the ranks run a script of the user's own; now: unix seconds
    while the run goes on, None once it is over.

    A metrics line tells in `seconds` what the time since the line before it went into, and the event `timing` at a
    clean end what all of the time since `ready` did. Where they do not, it is training but for the stalls that events
    tell.
    """
    found = timeline(_submitted(facts), facts.events, rows, now=now)
    if found is None:
        return None
    book = _Book(found.begin)
    launches: list[_Launch] = []
    for place, attempt in enumerate(found.attempts):
        book.to(attempt.begin, "restart" if place else "queue")
        going = now is not None and place + 1 == len(found.attempts)
        launches += _book_attempt(book, attempt, facts, script=script, going=going, last=attempt is found.attempts[-1])
    if found.attempts:
        book.to(found.end, "other" if found.attempts[-1].code == 0 else "restart")
    book.to(found.end, "queue")
    _move_lost(book, launches)
    return Ledger(
        begin=found.begin,
        end=found.end,
        spent=book.spent,
        attempts=len(found.attempts),
        launches=len(launches),
        failures=sum(not (launch.finished or launch.alive) for launch in launches),
    )


@dataclass(frozen=True)
class _Stretch:
    """Time between two metrics lines: the steps in it, and milliseconds of their training and data waits."""

    begin_step: int
    end_step: int
    spent: Mapping[str, int]


@dataclass
class _Launch:
    """One start of the ranks: what rank 0 told, and what was found out of it."""

    marks: list[Mark]
    finished: bool = False
    alive: bool = False
    stretches: list[_Stretch] = field(default_factory=list)

    @property
    def resumed(self) -> int | None:
        """The step that this launch began after; None where it did not come so far."""
        for event, before in (("resumed", 0), ("ready", 0), ("first_step", 1), (LINE, 1)):
            steps = (whole(mark.facts.get("step")) for mark in self.marks if mark.event == event)
            step = next((step for step in steps if step is not None), None)
            if step is not None:
                return step - before
        return None

    @property
    def failed(self) -> bool:
        """Whether rank 0 told of an error, or of a hang that it ended."""
        return any(mark.event in _FAILURES for mark in self.marks)

    @property
    def saved(self) -> list[int]:
        """Steps of its checkpoints."""
        saves = (mark.facts.get("step") for mark in self.marks if mark.event == "checkpoint_saved")
        return [step for save in saves if (step := whole(save)) is not None]


class _Book:
    """Milliseconds by kind, and up to when they have been accounted for."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.spent = dict.fromkeys(KINDS, 0)

    def to(self, at: int, kind: str, parts: Mapping[str, float] | None = None) -> dict[str, int]:
        """Account for the time up to `at`: milliseconds by kind in `parts`, the rest as `kind`. Gives what was added.

        Parts that are longer than the time itself are shortened alike. A time before the last one adds nothing.
        """
        time = max(at - self.at, 0)
        parts = parts or {}
        scale = min(1.0, time / total) if (total := sum(parts.values())) > 0 else 0.0
        added: dict[str, int] = {}
        left = time
        for name, part in parts.items():
            added[name] = min(int(part * scale), left)
            left -= added[name]
        added[kind] = added.get(kind, 0) + left
        for name, part_time in added.items():
            self.spent[name] += part_time
        self.at += time
        return added

    def move(self, time: int, kind: str, to: str) -> None:
        """Give milliseconds that are in one kind to another."""
        self.spent[kind] -= time
        self.spent[to] += time


def _submitted(facts: Evidence) -> float | None:
    try:
        return datetime.fromisoformat(facts.submission.time).timestamp() if facts.submission else None
    except (ValueError, OverflowError, OSError):
        return None


def _book_attempt(
    book: _Book, attempt: Attempt, facts: Evidence, *, script: bool, going: bool, last: bool
) -> list[_Launch]:
    """Account for one attempt up to its end. going: it may still be running; last: none came after it."""
    launches = [_Launch(marks) for marks in _split(attempt.marks)]
    for place, launch in enumerate(launches):
        newest = launch is launches[-1]
        marker = (facts.markers or {}).get(attempt.number) if newest else None
        marked = marker is not None and marker.state in ("done", "stopped")
        # A script of the user's own need not tell that it finished: its exit code does.
        ended_well = script and newest and attempt.code == 0
        launch.finished = marked or ended_well or any(mark.event == "finished" for mark in launch.marks)
        launch.alive = newest and going and not (attempt.ended or launch.finished or launch.failed)
        begin = _process_start(launch)
        # How long the container took is not known without its end: it is then in init.
        before = "restart" if place else "image" if begin is not None else "init"
        book.to(launch.marks[0].at if begin is None else begin, "run" if script else before)
        phase = _book_launch(book, launch, script=script)
    if not launches:
        book.to(attempt.end, "run" if script else "image")
    elif script:
        book.to(attempt.end, "run")
    elif launches[-1].alive:
        book.to(attempt.end, phase)
    elif launches[-1].finished or (last and not going):
        book.to(attempt.end, "other")
    else:
        book.to(attempt.end, "restart")
    return launches


def _split(marks: Iterable[Mark]) -> list[list[Mark]]:
    """The marks of each start of the ranks. In a run of older code, only `started` tells of one."""
    launches: list[list[Mark]] = []
    told = False  # whether the newest of them has its `started`
    for mark in marks:
        if not launches or mark.event == "rank_started" or (mark.event == "started" and told):
            launches.append([])
            told = False
        launches[-1].append(mark)
        told = told or mark.event == "started"
    return launches


def _process_start(launch: _Launch) -> int | None:
    """When the ranks' processes started; None where nothing tells.

    `seconds` is how long before the event that was. In a run of older code only the first step has it, counted from
    somewhat later than the process's start, perhaps even after the event before.
    """
    for mark in launch.marks:
        if mark.event in ("rank_started", "first_step"):
            seconds = number(mark.facts.get("seconds"))
            begin = mark.at - round(max(seconds or 0, 0) * 1000)
            return begin if mark.event == "rank_started" or begin < launch.marks[0].at else None
    return None


def _book_launch(book: _Book, launch: _Launch, *, script: bool) -> str:
    """Account for a launch up to its last sign, and say what it was at then: init, training or other."""
    phase, rest = "init", "run" if script else "training"
    step = launch.resumed or 0
    costs: dict[str, float] = {}
    told: dict[str, float] = {}  # by the lines of this launch
    for mark in launch.marks:
        cost = _cost(mark)
        if phase == "init" and mark.event != LINE:
            book.to(mark.at, "run" if script else phase, cost)
            phase = "training" if mark.event in ("ready", "first_step") else phase
        elif mark.event in (LINE, "timing", "finished"):
            parts = _parts(mark)
            if mark.event == "timing":
                parts = {kind: max(part - told.get(kind, 0), 0) for kind, part in parts.items()}
            told = {kind: told.get(kind, 0) + parts.get(kind, 0) for kind in (*told, *parts)}
            kind = "init" if phase == "init" else "other" if parts or mark.event == "finished" else rest
            reached = whole(mark.facts.get("step"))
            added = book.to(mark.at, kind, parts or costs)
            launch.stretches.append(_Stretch(step, step if reached is None else reached, added))
            step, costs = step if reached is None else reached, {}
            phase = "other" if mark.event == "finished" else "training"
        else:
            costs = {kind: costs.get(kind, 0) + cost.get(kind, 0) for kind in (*costs, *cost)}
    if costs:
        last = [mark for mark in launch.marks if _cost(mark)][-1]
        launch.stretches.append(_Stretch(step, max([step, *launch.saved]), book.to(last.at, rest, costs)))
    if phase == "training" and not (launch.finished or launch.alive):
        _book_error(book, launch)
    return phase


def _cost(mark: Mark) -> dict[str, float]:
    """Milliseconds that training stood still for what an event tells of: its `stall`, else its `seconds`."""
    kind = _COSTS.get(mark.event)
    seconds = number(mark.facts.get("stall", mark.facts.get("seconds"))) if kind else None
    return {kind: seconds * 1000} if kind and seconds and seconds > 0 else {}


def _parts(mark: Mark) -> dict[str, float]:
    """Milliseconds by kind, from a line's `seconds`; empty where it has none."""
    sums = mark.facts.get("seconds")
    parts: dict[str, float] = {}
    for name, value in sums.items() if isinstance(sums, Mapping) else ():
        seconds, kind = number(value), _PARTS.get(name, "other")
        if seconds is not None and seconds > 0:
            parts[kind] = parts.get(kind, 0) + seconds * 1000
    return parts


def _book_error(book: _Book, launch: _Launch) -> None:
    """The steps between the last line and the error that ended a launch are lost.

    A hang also ends in an error, but much later: no more is taken for steps than was ever between two lines.
    """
    lines = [mark.at for mark in launch.marks if mark.event == LINE]
    longest = max((after - before for before, after in pairwise(lines)), default=0)
    error = next((mark.at for mark in launch.marks if mark.event in _FAILURES and mark.at >= book.at), None)
    if error is not None:
        book.to(min(error, book.at + longest), "lost")


def _move_lost(book: _Book, launches: Sequence[_Launch]) -> None:
    """Steps after the one that a later launch resumed from are lost work, with their data waits.

    Of ranks that failed and were not (or not yet) followed by others, what is in their newest checkpoint is kept.
    """
    kept: int | None = None
    for launch in reversed(launches):
        resumed = launch.resumed
        if kept is None and resumed is not None and not (launch.finished or launch.alive):
            kept = max([resumed, *launch.saved])
        if kept is not None:
            for stretch in launch.stretches:
                _move_stretch(book, stretch, kept)
        if resumed is not None:
            kept = resumed if kept is None else min(kept, resumed)


def _move_stretch(book: _Book, stretch: _Stretch, kept: int) -> None:
    steps = stretch.end_step - stretch.begin_step
    lost = min(max(stretch.end_step - kept, 0), steps) / steps if steps > 0 else float(stretch.end_step > kept)
    for kind in ("training", "data"):
        book.move(int(stretch.spent.get(kind, 0) * lost), kind, "lost")
