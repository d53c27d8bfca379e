"""What became of a run's time: each second from submission to the end, in one of a few kinds."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from slurmddp.records.job_events import Network, Preflight
from slurmddp.records.metrics import Metrics
from slurmddp.records.rank_events import Finished, FirstStep, Hang, Ready, Timing
from slurmddp.run.evidence import Evidence
from slurmddp.run.metrics import NEWEST
from slurmddp.run.rank_starts import (
    FAILURES,
    FROM_ZERO,
    TRAINING,
    WENT_ON,
    RankStart,
    Stretch,
    cost_of,
    parts_of,
    process_start,
    split,
)
from slurmddp.run.timeline import Attempt, timeline

#: The kinds of time, in the order in which they are shown, and what counts as each.
KINDS = {
    "queue": "from submission to the first start of job.sh",
    "image": "from the start of job.sh to the start of the ranks: srun, container, torchrun",
    "init": "imports, rendezvous, data, model, loading the checkpoint",
    "preflight": "checks of the nodes before the ranks start",
    "training": "forward, backward, optimizer, and communication as far as it overlaps with them",
    "network": "stall: waiting for other ranks (collectives), which a slow rank also delays",
    "data": "stall: waiting for data",
    "checkpoint": "stall: waiting for a checkpoint",
    "evaluation": "the validation set",
    "lost": "steps that had to be trained again",
    "hang": "no progress, until the run noticed it",
    "restart": "from the last event before a failure to the next start",
    "requeue": "from the exit of job.sh to its next start: Slurm's hold and the queue",
    "run": "your own script: what its time went into is not measured",
    "other": "shutdown, and all other time",
}


class Recovery(NamedTuple):
    """The ranks train again. attempt: in which; step: its first new one, if known; milliseconds: from the last sign of
    training before; failed: whether a failure had ended that, and not the time limit; went_on: whether they went on
    from where they were, and did not begin again. None if that is unknown, as it may be of a script of the user's own.
    """

    attempt: int
    step: int | None
    milliseconds: int
    failed: bool
    went_on: bool | None

    @property
    def recovered(self) -> bool:
        """Return whether training is known to have gone on after a failure."""
        return self.failed and self.went_on is True


@dataclass(frozen=True)
class Ledger:
    """The time of one run. All times are whole milliseconds, so that they add up exactly.

    begin, end     unix time of submission, and of the end (of now, while the run continues)
    spent          kind -> milliseconds, for every one of KINDS; their sum is end - begin
    jobs           starts of the job's script
    attempts       starts of torchrun, which the script repeats where nodes were lost
    rank_starts    starts of the ranks, which torchrun repeats inside an attempt
    failures       those that failed or were killed, not by a cancel, the time limit or a preemption
    recoveries     each time that the ranks trained again, oldest first
    """

    begin: int
    end: int
    spent: Mapping[str, int]
    jobs: int
    attempts: int
    rank_starts: int
    failures: int
    recoveries: tuple[Recovery, ...] = ()

    @property
    def recovered(self) -> int:
        """Return how often the run is known to have gone on after a failure."""
        return sum(each.recovered for each in self.recoveries)

    @property
    def wall(self) -> int:
        return self.end - self.begin

    @property
    def goodput(self) -> float | None:
        """Training's share of the time, from 0 to 1. None without any time, and for a script that tells nothing."""
        return self.spent["training"] / self.wall if self.wall and not self.spent["run"] else None


def ledger(facts: Evidence, rows: Sequence[Metrics], *, script: bool, now: float | None) -> Ledger | None:
    """Account for a run's time. Pure; None for a run that was never submitted and never began.

    rows: the lines of metrics.jsonl; script: whether the ranks run a script of the user's own; now: unix seconds
    while the run continues, None once it is over.

    A metrics line and, at a clean end, the event `timing` tell in `seconds` what the time since `ready` went into.
    Where they do not, it is training but for the stalls that events tell. Of a script whose lines do not, nothing is
    known.
    """
    found = timeline(facts.submitted, facts.events, rows, now=now)
    if found is None:
        return None
    unknown = script and not any(row.seconds for row in rows)
    book = _Book(found.begin)
    starts: list[RankStart] = []
    for index, attempt in enumerate(found.attempts):
        queued = attempt.begins and found.attempts[index - 1].over
        book.to(attempt.begin, ("requeue" if queued else "restart") if index else "queue")
        last = index + 1 == len(found.attempts)
        going = last and now is not None
        starts += _book_attempt(book, attempt, facts, script=script, unknown=unknown, going=going, last=last)
    if found.attempts:
        newest = found.attempts[-1]
        again = facts.requeued is not None or newest.code != 0
        book.to(found.end, ("requeue" if again else "other") if newest.over or newest.code == 0 else "restart")
    book.to(found.end, "queue")
    _move_lost(book, starts, script=script)
    return Ledger(
        begin=found.begin,
        end=found.end,
        spent=book.spent,
        jobs=sum(index == 0 or attempt.begins for index, attempt in enumerate(found.attempts)),
        attempts=len(found.attempts),
        rank_starts=len(starts),
        failures=sum(start.died for start in starts),
        recoveries=tuple(_recoveries(starts, script=script)) or (tuple(_again(found.attempts)) if script else ()),
    )


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


def _recoveries(starts: Sequence[RankStart], *, script: bool) -> Iterator[Recovery]:
    """Yield recoveries: from the last sign of training of a start to the first new step of a later start."""
    since: int | None = None
    best: int | None = None
    failed = False
    for start in starts:
        first = next((mark for mark in start.marks if isinstance(mark.facts, FirstStep | Metrics)), None)
        if first is not None:
            if since is not None:
                went_on = {WENT_ON: True, FROM_ZERO: False}.get(start.how or "") if script else True
                if script and went_on and not start.finished and best is not None and (start.reached or 0) <= best:
                    went_on = None  # it has not made up for the steps that it lost
                yield Recovery(start.attempt, first.step, max(first.at - since, 0), failed, went_on)
            since = max(mark.at for mark in start.marks if isinstance(mark.facts, TRAINING))
            failed = False
        failed = failed or start.died
        best = max((step for step in (best, start.reached) if step is not None), default=None)


def _again(attempts: Sequence[Attempt]) -> Iterator[Recovery]:
    """Yield the recoveries of a script whose steps nobody saw: from the end of an attempt to the start of the next one.

    An attempt that failed as well has recovered nothing, as far as anybody can tell. What it went on from is unknown.
    """
    for before, after in pairwise(attempts):
        if before.code == 0 or after.code in (0, None):
            yield Recovery(after.number, None, max(after.begin - before.end, 0), before.code != 0, None)


def _book_attempt(
    book: _Book, attempt: Attempt, facts: Evidence, *, script: bool, unknown: bool, going: bool, last: bool
) -> list[RankStart]:
    """Account for one attempt up to its end. going: it may still be running; last: none came after it.

    unknown: nothing tells what the script's time went into.
    """
    _book_preflight(book, attempt)
    starts = [RankStart(attempt.number, marks) for marks in split(attempt.marks)]
    for index, start in enumerate(starts):
        newest = start is starts[-1]
        marker = (facts.markers or {}).get(attempt.number) if newest else None
        marked = marker is not None and marker.state in ("done", "stopped")
        # A script of the user's own need not tell that it finished: its exit code does.
        ended_well = script and newest and attempt.code == 0
        start.finished = marked or ended_well or any(isinstance(mark.facts, Finished) for mark in start.marks)
        start.alive = newest and going and not (attempt.ended or start.finished or start.failed)
        if newest and not (start.finished or start.alive or start.failed):
            killed = last and not attempt.ended and facts.cancel_requested  # with job.sh
            start.ended_by = "cancelled" if killed else attempt.ended_by
        begin = process_start(start)
        # How long the container took is not known without its end: it is then in init.
        before = "restart" if index else "image" if begin is not None else "init"
        book.to(start.marks[0].at if begin is None else begin, "run" if unknown else before)
        phase = _book_start(book, start, unknown=unknown)
    if not starts:
        book.to(attempt.end, "run" if unknown else "image")
    elif unknown:
        book.to(attempt.end, "run")
    elif starts[-1].alive:
        book.to(attempt.end, phase)
    elif starts[-1].finished or (last and not going):
        book.to(attempt.end, "other")
    else:
        book.to(attempt.end, "restart")
    return starts


def _book_preflight(book: _Book, attempt: Attempt) -> None:
    """The checks of nodes and network, of which the script tells when they have ended and how long they took."""
    for mark in attempt.script:
        if isinstance(mark.facts, Preflight | Network):
            book.to(mark.begin, "image")
            book.to(mark.at, "preflight")


def _book_start(book: _Book, start: RankStart, *, unknown: bool) -> str:
    """Account for a start up to its last sign, and say what it was at then: init, training or other."""
    phase, rest = "init", "run" if unknown else "training"
    step = start.resumed or 0
    costs: dict[str, float] = {}
    told: dict[str, float] = {}  # by the lines of this start
    for mark in start.marks:
        cost = cost_of(mark)
        if phase == "init" and not isinstance(mark.facts, Metrics):
            book.to(mark.at, "run" if unknown else phase, cost)
            phase = "training" if isinstance(mark.facts, Ready | FirstStep) else phase
        elif isinstance(mark.facts, Metrics | Timing | Finished):
            parts = parts_of(mark)
            totals, told = told, {**told, **parts}
            parts = {kind: part - totals.get(kind, 0) for kind, part in parts.items() if part > totals.get(kind, 0)}
            kind = "init" if phase == "init" else "other" if parts or isinstance(mark.facts, Finished) else rest
            reached = mark.step
            added = book.to(mark.at, kind, parts or costs)
            start.stretches.append(Stretch(step, step if reached is None else reached, added))
            step, costs = step if reached is None else reached, {}
            phase = "other" if isinstance(mark.facts, Finished) else "training"
        else:
            costs = {kind: costs.get(kind, 0) + cost.get(kind, 0) for kind in (*costs, *cost)}
    if costs:
        last = [mark for mark in start.marks if cost_of(mark)][-1]
        start.stretches.append(Stretch(step, max([step, *start.saved]), book.to(last.at, rest, costs)))
    if phase == "training" and not (start.finished or start.alive):
        _book_error(book, start)
    return phase


def _book_error(book: _Book, start: RankStart) -> None:
    """The steps between the last line and the error that ended a start are lost.

    A hang also ends in an error, but much later: no more is taken for steps than was between two of the newest lines,
    and the rest up to its notice is the hang.
    """
    lines = [mark.at for mark in start.marks if isinstance(mark.facts, Metrics)][-NEWEST:]
    longest = max((after - before for before, after in pairwise(lines)), default=0)
    error = next((mark.at for mark in start.marks if isinstance(mark.facts, FAILURES) and mark.at >= book.at), None)
    if error is not None:
        book.to(min(error, book.at + longest), "lost")
    hang = next((mark.at for mark in start.marks if isinstance(mark.facts, Hang)), None)
    if hang is not None:
        book.to(hang, "hang")


def _move_lost(book: _Book, starts: Sequence[RankStart], *, script: bool) -> None:
    """Steps after the one that a later start resumed from are lost work, with their data waits.

    Of ranks that failed and were not (or not yet) followed by others, what is in their newest checkpoint is kept. A
    script may have checkpoints that it does not tell of: if nothing followed, nothing counts as lost. If its steps
    begin at 1 again, the time before is unknown, unless its ranks saw that it loaded nothing.
    """
    kept: int | None = None
    kind = "lost"
    for start in reversed(starts):
        resumed = start.resumed
        tells = bool(start.saved) or not script
        if kept is None and resumed is not None and tells and not (start.finished or start.alive):
            kept = max([resumed, *start.saved])
        if kept is not None:
            for stretch in start.stretches:
                _move_stretch(book, stretch, kept, kind)
        if resumed is not None:
            kept = resumed if kept is None else min(kept, resumed)
            kind = "lost" if start.how == FROM_ZERO else "run" if script and resumed == 0 else kind


def _move_stretch(book: _Book, stretch: Stretch, kept: int, to: str) -> None:
    steps = stretch.end_step - stretch.begin_step
    lost = min(max(stretch.end_step - kept, 0), steps) / steps if steps > 0 else float(stretch.end_step > kept)
    for kind in {"training", "network", "data", "run"} - {to}:
        book.move(int(stretch.spent.get(kind, 0) * lost), kind, to)
