"""When things happened in a run: its events and metrics lines in one order that no clock can turn back."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from heapq import merge

from slurmddp.records.events import Event, Facts
from slurmddp.records.job_events import AttemptEnded, AttemptStarted, JobEnded, JobStarted, Network, Preflight
from slurmddp.records.metrics import Metrics
from slurmddp.records.rank_events import Hang

#: What the job's script writes, whichever rank it is about; else it is an event without a rank.
_OF_SCRIPT = (JobStarted, JobEnded, AttemptStarted, AttemptEnded)


@dataclass(frozen=True)
class Mark:
    """One moment that somebody wrote down. at: unix time in milliseconds; facts: of an event, or a metrics line."""

    at: int
    facts: Facts
    rank: int | None = None

    @property
    def step(self) -> int | None:
        """Return the step that it tells of, if it tells of one."""
        return getattr(self.facts, "step", None)

    @property
    def begin(self) -> int:
        """Return when that began which the script tells the end of: a check before the ranks start."""
        return self.at - milliseconds(self.facts.seconds) if isinstance(self.facts, Preflight | Network) else self.at


@dataclass(frozen=True)
class Attempt:
    """One attempt of the job's script: begin and end in milliseconds, and what rank 0 told in between.

    A script makes several if it continues without a lost node. begins: whether it is the first one of a start
    of the script; ended: whether the script wrote down its end, and code: the exit code that it gave there; over:
    whether the script ended with it; ended_by: what ended it from outside (cancelled, time limit, preemption), or
    empty. script: what the script itself told in between.
    """

    number: int
    begin: int
    end: int
    ended: bool
    code: int | None
    marks: tuple[Mark, ...]
    begins: bool = True
    over: bool = False
    ended_by: str = ""
    script: tuple[Mark, ...] = ()


@dataclass(frozen=True)
class Timeline:
    """A run from its submission to its end, or to now. Attempts do not overlap; marks lie inside theirs, in order."""

    begin: int
    end: int
    attempts: tuple[Attempt, ...]


def timeline(
    submitted: float | None, events: Sequence[Event], rows: Sequence[Metrics], *, now: float | None
) -> Timeline | None:
    """Put a run's records in order. Pure; None if neither a submission nor an attempt is known.

    submitted: unix seconds; rows: the lines of metrics.jsonl; now: unix seconds while the run continues, None once it
    is over.

    The clocks of the nodes and of the login host differ, so no time is taken as it stands: the order is that of the
    attempts and of the lines in their files; a time before its forerunner's counts as that one's, and the marks of
    an attempt stay between its begin and its end (all are shifted alike where the clock of rank 0's node is not that
    of the script's). Left out are the lines of ranks other than 0, but for a hang that one of them told, and those
    without a sound time and attempt.
    """
    told = _by_attempt(events, rows)
    raw = [_attempt(attempt, marks) for attempt, marks in sorted(told.items())]
    known = (_moment(submitted), raw[0].begin if raw else None)
    begin = min((at for at in known if at is not None), default=None)
    if begin is None:
        return None
    moment = _moment(now)
    cursor, attempts = begin, []
    for index, each in enumerate(raw):
        last = index + 1 == len(raw)
        attempts.append(_bounded(each, cursor, until=moment if last else raw[index + 1].begin, open_end=last))
        cursor = attempts[-1].end
    if not raw and moment is None:  # over before it began: the newest event (it was cancelled) tells when
        cursor = max([cursor, *(at for event in events if (at := _moment(event.time)) is not None)])
    return Timeline(begin, max(cursor, moment or 0), tuple(attempts))


def milliseconds(seconds: float | None) -> int:
    """Return a duration; 0 for one that is not known."""
    return max(round((seconds or 0) * 1000), 0)


def _moment(seconds: float | None) -> int | None:
    return None if seconds is None else milliseconds(seconds)


@dataclass
class _Told:
    """What was written of one attempt, each in its file's order."""

    script: list[Mark] = field(default_factory=list)
    events: list[Mark] = field(default_factory=list)
    lines: list[Mark] = field(default_factory=list)


def _by_attempt(events: Sequence[Event], rows: Sequence[Metrics]) -> dict[int, _Told]:
    told: dict[int, _Told] = {}
    for event in events:
        at = _moment(event.time)
        if at is None or event.attempt is None:
            continue
        own = isinstance(event.facts, _OF_SCRIPT) or event.rank is None
        if own or event.rank == 0 or isinstance(event.facts, Hang):
            mine = told.setdefault(event.attempt, _Told())
            (mine.script if own else mine.events).append(Mark(at, event.facts, event.rank))
    for row in rows:
        at = _moment(row.time)
        if at is not None and row.attempt is not None:
            told.setdefault(row.attempt, _Told()).lines.append(Mark(at, row, 0))
    return told


def _attempt(attempt: int, told: _Told) -> Attempt:
    """An attempt with its times as they were written."""
    job_ended, own_end = _last(told.script, JobEnded), _last(told.script, AttemptEnded)
    ended = job_ended or own_end
    # At one moment the line comes first: the end, and a save, are told after it.
    inner = _in_order(_told_by_others(told.events, ended))
    marks = tuple(merge(_in_order(told.lines), inner, key=lambda mark: mark.at))
    script = tuple(mark for mark in told.script if isinstance(mark.facts, AttemptStarted | Preflight | Network))
    job_started = next((mark.at for mark in told.script if isinstance(mark.facts, JobStarted)), None)
    started = min((mark.begin for mark in script), default=None) if job_started is None else job_started
    known = (started, *(mark.at for mark in (*marks, *told.script)))
    times = [at for at in known if at is not None]
    ends = [mark.facts for mark in (own_end, job_ended) if mark]
    return Attempt(
        number=attempt,
        begin=times[0],
        end=ended.at if ended else max(times),
        ended=ended is not None,
        code=next((facts.exit_code for facts in ends if isinstance(facts, AttemptEnded | JobEnded)), None),
        marks=marks,
        begins=job_started is not None,
        over=job_ended is not None,
        ended_by=next((facts.ended_by for facts in ends if isinstance(facts, AttemptEnded)), ""),
        script=tuple(_in_order(script)),
    )


def _last(marks: Sequence[Mark], kind: type[Facts]) -> Mark | None:
    return next((mark for mark in reversed(marks) if isinstance(mark.facts, kind)), None)


def _told_by_others(events: Sequence[Mark], ended: Mark | None) -> Iterable[Mark]:
    """A hang that another rank told, by another clock, comes no later than rank 0's next word or the end."""
    latest: int | None = ended.at if ended else None
    found: list[Mark] = []
    for mark in reversed(events):
        other = mark.rank != 0
        found.append(replace(mark, at=min(mark.at, latest)) if other and latest is not None else mark)
        latest = latest if other else mark.at
    return reversed(found)


def _in_order(marks: Iterable[Mark]) -> list[Mark]:
    """The same marks, none earlier than the one before it."""
    ordered: list[Mark] = []
    for mark in marks:
        ordered.append(replace(mark, at=max(mark.at, ordered[-1].at)) if ordered else mark)
    return ordered


def _bounded(attempt: Attempt, earliest: int, *, until: int | None, open_end: bool) -> Attempt:
    """An attempt after `earliest`, its marks inside it.

    until: when the next attempt began, or, for the last one (open_end), what time it is now if the run continues. Only
    an attempt that wrote down no end needs it.
    """
    begin = max(attempt.begin, earliest)
    end = max(attempt.end, begin)
    if not attempt.ended and until is not None:
        end = max(end, until) if open_end else max(min(end, until), begin)
    shift = 0
    if attempt.marks:
        shift = max(min(0, end - attempt.marks[-1].at), begin - attempt.marks[0].at)
    marks = tuple(replace(mark, at=min(max(mark.at + shift, begin), end)) for mark in attempt.marks)
    script = tuple(replace(mark, at=min(max(mark.at, begin), end)) for mark in attempt.script)
    return replace(attempt, begin=begin, end=end, marks=marks, script=script)
