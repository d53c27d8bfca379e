"""How far a run is and how fast it goes: from its events, its newest metrics lines and the scheduler's word."""

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from slurmddp.cluster.base import JobView
from slurmddp.cluster.reasons import is_held, reason_text
from slurmddp.cluster.states import JobState
from slurmddp.records import rank_events
from slurmddp.records.events import Event, keys_of, of
from slurmddp.records.job_events import AttemptEnded, AttemptStarted, JobStarted
from slurmddp.records.metrics import Metrics
from slurmddp.records.progress import read_progress
from slurmddp.records.values import number
from slurmddp.run.evidence import Evidence
from slurmddp.run.layout import RunFolder
from slurmddp.shared.files import read_plain
from slurmddp.shared.units import short
from slurmddp.visible import one_line

_PER_SECOND = "_per_second"
#: Fields of Progress that --json has as they are.
_TOLD = ("steps", "loss", "submitted", "started", "job_started", "ended", "time_limit", "nodes", "backend")
#: Events of a start, and of one that failed.
_BEGINS = (AttemptStarted, rank_events.RankStarted)
_FAILED = (rank_events.Error, rank_events.RankExited, rank_events.RanksStopped)


@dataclass(frozen=True)
class Progress:
    """Times are unix seconds; None where nothing tells.

    speed: per second, by unit; ends: when the last step is expected, while the run trains; slow: stragglers of the
    newest attempt; network: share of the newest steps' time that rank 0 waited for the network; backend: nccl or gloo;
    reason, starts: why a job waits, and when Slurm expects it to start; stepless: starts of the ranks in a row that
    failed before a step was seen, with the newest one; seen: whether any step of this run was ever seen; earlier:
    whether the step is of a start before the newest one.
    """

    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    speed: Mapping[str, float] = field(default_factory=dict)
    ends: float | None = None
    submitted: float | None = None
    started: float | None = None
    job_started: float | None = None
    ended: float | None = None
    time_limit: int | None = None
    nodes: int | None = None
    slow: Sequence[tuple[Event, rank_events.StragglerBegins]] = ()
    network: float | None = None
    backend: str | None = None
    reason: str | None = None
    starts: str | None = None
    stepless: int = 0
    seen: bool = False
    earlier: bool = False

    @property
    def loops(self) -> bool:
        """Return whether the ranks start again and again without a step."""
        return self.stepless > 1

    def as_dict(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in _TOLD},
            "per_second": dict(self.speed),
            "expected_end": None if self.ends is None else round(self.ends),
            "starts_without_step": self.stepless,
            "stragglers": [{"time": event.time, **keys_of(facts)} for event, facts in self.slow],
            "network_share": None if self.network is None else round(self.network, 4),
            "waits": None if self.reason is None else {"reason": self.reason, "text": reason_text(self.reason)},
            "expected_start": self.starts,
        }


def find_progress(
    folder: RunFolder, facts: Evidence, view: JobView | None, rows: Sequence[Metrics], *, running: bool
) -> Progress:
    """Put it together. rows: the newest metrics lines; running: whether the job runs, so that it may train."""
    recent = _recent(rows)
    newest = recent[-1] if recent else None
    since = next((event.time for event, _ in of(facts.events[::-1], rank_events.RankStarted)), None)
    earlier = _begins_anew(facts)
    moment = newest.time if newest else None
    if earlier or (moment is not None and since is not None and moment < since):
        recent = ()  # of an earlier start: nothing is known of this one's speed
    stepless, seen = _stepless(facts)
    step, steps = _written(folder)
    marker = facts.marker
    if step is None and newest:
        step = newest.step
    if step is None and marker is not None:
        step = marker.step
    if steps is None and marker is not None:
        steps = marker.steps
    pending = view is not None and view.state is JobState.PENDING
    return Progress(
        step=step,
        steps=steps,
        loss=number(newest.figures.get("loss")) if newest else None,
        speed=_speed(newest) if newest and recent else {},
        ends=_ends(recent, steps) if running else None,
        submitted=facts.submitted,
        started=next((event.time for event, _ in of(facts.events, JobStarted)), None),
        job_started=facts.started.time if facts.started else None,
        ended=facts.ended_at,
        time_limit=view.time_limit if view else None,
        nodes=_nodes(facts, view),
        slow=_stragglers(facts),
        network=_network(recent),
        backend=next(
            (moment.backend for _, moment in of(facts.events[::-1], rank_events.Started) if moment.backend), None
        ),
        reason=view.reason or None if view and pending else None,
        starts=view.start if view and pending and not is_held(view.reason) else None,
        stepless=stepless,
        seen=seen or step is not None,
        earlier=earlier,
    )


def _recent(rows: Sequence[Metrics]) -> Sequence[Metrics]:
    """The newest lines of one start of the ranks: their steps and times only grow."""
    first = len(rows) - 1
    while first > 0 and _follows(rows[first - 1], rows[first]):
        first -= 1
    return rows[max(first, 0) :]


def _follows(before: Metrics, after: Metrics) -> bool:
    if not before.same_start(after) or before.time is None or after.time is None:
        return False
    return before.step < after.step and before.time <= after.time


def _written(folder: RunFolder) -> tuple[int | None, int | None]:
    """Step and steps, as rank 0 writes them every two seconds."""
    try:
        progress = read_progress(read_plain(folder.progress, 100, folder.path).decode("ascii", "replace"))
    except OSError:
        return None, None
    return progress or (None, None)


def _speed(row: Metrics) -> dict[str, float]:
    """`tokens: 1.2e6, samples: 512.0`: what the line says per second, the samples last."""
    speeds = {
        name.removesuffix(_PER_SECOND): value
        for name, figure in row.figures.items()
        if name.endswith(_PER_SECOND) and (value := number(figure)) is not None
    }
    return dict(sorted(speeds.items(), key=lambda pair: pair[0] == "samples"))


def _ends(recent: Sequence[Metrics], steps: int | None) -> float | None:
    """Return when the last step is expected, at the mean speed of the newest lines, saving and evaluating included."""
    if steps is None or len(recent) < 2:
        return None
    first, last = recent[0], recent[-1]
    if first.time is None or last.time is None:
        return None
    per_step = (last.time - first.time) / (last.step - first.step)
    return last.time + max(steps - last.step, 0) * per_step


def _network(recent: Sequence[Metrics]) -> float | None:
    spent = recent[-1].since(recent[0] if len(recent) > 1 else None) if recent else {}
    return spent.get("network", 0.0) / sum(spent.values()) if spent and "unmeasured" not in spent else None


def _stepless(facts: Evidence) -> tuple[int, bool]:
    """Return how many starts in a row failed before a step was seen, with the newest one, and whether one ever was."""
    count, seen, failed = 0, False, True
    for event in facts.events:
        fact = event.facts
        if isinstance(fact, rank_events.RankStarted):
            count = count + 1 if failed else 1
            failed = False
        elif isinstance(fact, rank_events.FirstStep):
            count, seen = 0, True
        elif isinstance(fact, _FAILED) or (isinstance(fact, AttemptEnded) and fact.decision in ("next", "failed")):
            failed = True
    return count, seen


def _begins_anew(facts: Evidence) -> bool:
    """Return whether an earlier start made steps, and the newest one has made none."""
    steps = [at for at, event in enumerate(facts.events) if isinstance(event.facts, rank_events.FirstStep)]
    return bool(steps) and any(isinstance(event.facts, _BEGINS) for event in facts.events[steps[-1] :])


def _stragglers(facts: Evidence) -> list[tuple[Event, rank_events.StragglerBegins]]:
    """Those of the newest attempt that have not ended."""
    slow: dict[tuple[str, str], tuple[Event, rank_events.StragglerBegins]] = {}
    for event in facts.events:
        fact = event.facts
        if isinstance(fact, rank_events.RankStarted) or event.attempt != facts.attempt:
            slow.clear()
        if isinstance(fact, rank_events.StragglerBegins):
            slow[fact.host, fact.part] = event, fact
        elif isinstance(fact, rank_events.StragglerEnds):
            slow.pop((fact.host, fact.part), None)
    return list(slow.values())


def _nodes(facts: Evidence, view: JobView | None) -> int | None:
    """Return how many nodes the newest attempt has, else the job."""
    for event in facts.events[::-1]:
        if isinstance(event.facts, AttemptStarted | JobStarted) and event.facts.nodes:
            return count_nodes(event.facts.nodes)
    return count_nodes(view.nodes) if view and view.nodes else None


def count_nodes(text: str) -> int:
    """Return how many nodes a list of names has, with Slurm's ranges: `n[1-3,7] login` has five."""
    return sum(map(_size, re.findall(r"(?:\[[^\]]*\]?|[^\[, ])+", text)))


def _size(word: str) -> int:
    """Return how many names one entry of a node list stands for: the product of its brackets."""
    return math.prod(sum(map(_range, part.split(","))) for part in re.findall(r"\[([^\]]*)", word))


def _range(text: str) -> int:
    first, _, last = text.partition("-")
    return int(last) - int(first) + 1 if first.isdecimal() and last.isdecimal() and len(last) < 10 else 1


# --- for people


def progress_lines(found: Progress, *, going: bool) -> list[str]:
    """Return the lines of `status` about steps, speed and time."""
    lines = []
    if found.step is not None:
        loss = "" if found.loss is None else f", loss {found.loss:.4g}"
        earlier = " (of an earlier start)" if found.earlier else ""
        lines.append(f"step     {steps_text(found.step, found.steps)}{loss}{earlier}")
    if found.loops:
        as_far = "" if found.seen else " (as far as slurmddp sees the script's steps)"
        lines.append(f"starts   0 steps in {found.stepless} starts{as_far}")
    if found.speed and going:
        lines.append(one_line(f"speed    {speed_text(found.speed)}"))
    if found.ends is not None and found.step != found.steps:
        lines.append(f"ends     {_when(found.ends)} at this speed{_beyond(found)}")
    if (now := time.time() if going else found.ended) is not None and found.job_started is not None:
        limit = f" of {span(found.time_limit)}" if found.time_limit and going else ""
        lines.append(f"time     {span(now - found.job_started)}{limit} in this job")
    if found.nodes is not None:
        backend = f" ({one_line(found.backend)})" if found.backend else ""
        lines.append(f"nodes    {found.nodes}{backend}")
    if found.network is not None and going:
        lines.append(f"stall    {100 * found.network:.2g} % of the step time: waiting for the network")
    if going:
        lines += [f"slow     {_slow(each)}" for _, each in found.slow]
    return lines


def waits_text(reason: str | None, starts: str | None) -> str:
    """Return why a job waits, and when it should start."""
    text = reason_text(reason) if reason else ""
    cause = (text if text == reason else f"{text} ({reason})") if reason else "Slurm gives no reason"
    if reason and is_held(reason):
        return one_line(cause)
    return one_line(f"{cause}; starts about {_day_and_time(starts)}" if starts else f"{cause}; no expected start yet")


def steps_text(step: int | None, steps: int | None) -> str:
    """Return `500 of 1000 (50 %)`."""
    if step is None:
        return ""
    return f"{step} of {steps} ({100 * step / steps:.3g} %)" if steps else str(step)


def speed_text(speed: Mapping[str, float]) -> str:
    """Return `1.2M tokens/s, 512 samples/s`."""
    return ", ".join(f"{short(value)} {unit}/s" for unit, value in speed.items())


def span(seconds: float) -> str:
    """Return `3:12:04`, from a day on `2 d 3:12:04`."""
    whole_seconds = max(round(seconds), 0)
    days, rest = divmod(whole_seconds, 86400)
    clock = f"{rest // 3600}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days} d {clock}" if days else clock


def _beyond(progress: Progress) -> str:
    if progress.time_limit is None or progress.job_started is None or progress.ends is None:
        return ""
    return ", after the time limit" if progress.ends > progress.job_started + progress.time_limit else ""


def _when(moment: float) -> str:
    """`18:40 (in 3:12:00)`, with the day where it is not today."""
    then = datetime.fromtimestamp(moment)
    return f"{_day_and_time(then.isoformat())} (in {span(moment - time.time())})"


def _day_and_time(text: str) -> str:
    """Return a local time without its seconds, and without the day if it is today."""
    try:
        then = datetime.fromisoformat(text)
    except ValueError:
        return text
    return then.strftime("%H:%M" if then.date() == datetime.now().date() else "%Y-%m-%d %H:%M")


def _slow(each: rank_events.StragglerBegins) -> str:
    times = "" if each.factor is None else f", {each.factor:.2g} times the others"
    return one_line(f"{each.host}: {each.part}{times} (rank {each.slow_rank})")
