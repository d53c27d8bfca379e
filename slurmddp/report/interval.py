"""How often a job should save, from what its earlier runs measured."""

import math
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slurmddp.cluster.states import JobState
from slurmddp.job.job import Checkpoint
from slurmddp.job.plan.model import Plan
from slurmddp.records.events import Event, newest, of
from slurmddp.records.job_events import CancelRequested, JobEnded
from slurmddp.records.rank_events import CheckpointSaved, Error, Finished, FirstStep, Started
from slurmddp.run import index
from slurmddp.run.events import read_events
from slurmddp.run.layout import RunFolder

#: Node-hours between failures where no run has seen any: 6.5 failures in 1,000 node-days, as Kokolis et al. report of a
#: cluster of 16,000 GPUs ("Revisiting Reliability in Large-Scale Machine Learning Research Clusters", HPCA 2025).
DEFAULT_NODE_HOURS = 3700.0
#: Runs that are looked at, the newest: an older one had another model, or another file system.
RUNS = 10
#: Seconds that are suggested at least.
SHORTEST = 60.0
#: Seconds without a sign of life after which an attempt that never reported its end is taken to have died.
SILENCE = 3600.0
#: An attempt that ends with one of these was ended by the job itself; saving more often would not have helped.
_OWN_ERRORS = frozenset({"UserError", "NotFiniteError"})
_ASKED = (JobState.CANCELLED, JobState.TIMED_OUT, JobState.PREEMPTED)


@dataclass(frozen=True)
class History:
    """What earlier runs measured. stall and write: medians in seconds, a step's wait for a checkpoint and the whole
    save; failures: attempts that were training and died; node_hours: of all attempts that were training."""

    runs: int
    stall: float
    write: float
    failures: int
    node_hours: float


def best_interval(stall: float, between: float) -> float:
    """Return seconds of work between two checkpoints that lose least time, where one costs `stall` seconds and a
    failure of the job comes every `between` seconds on average.

    Young's sqrt(2 * stall * between) (CACM 17(9), 1974, p. 530) with the next two terms by Daly, "A higher order
    estimate of the optimum checkpoint interval for restart dumps" (FGCS 22, 2006, eq. 37), which matter where `stall`
    is not small; from half of it on, `between` itself.
    """
    if stall >= 2 * between:
        return between
    ratio = stall / (2 * between)
    return math.sqrt(2 * stall * between) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall


def between_failures(history: History, nodes: int) -> float:
    """Return the seconds between failures of a job on `nodes` nodes that fail equally often.

    Where none was seen, it is at least the third part of what was seen (the rule of three: 95 %), and at least what is
    usual: a few quiet hours say nothing. Nor does one failure in a short run: what is usual weighs as much as one
    failure, in the geometric mean, as the rates of clusters differ by orders of magnitude.
    """
    if not history.failures:
        return max(history.node_hours / 3, DEFAULT_NODE_HOURS) / nodes * 3600
    seen = history.node_hours / history.failures
    weight = 1 / (history.failures + 1)
    return float(DEFAULT_NODE_HOURS**weight * seen ** (1 - weight)) / nodes * 3600


def interval_lines(plan: Plan, wanted: Checkpoint) -> list[str]:
    """Return one line of `slurmddp check`, or none if no earlier run of this name was measured."""
    if plan.runtime_job is None:
        return []
    history = measured(earlier_runs(plan.job.name), time.time())
    return [] if history is None else [interval_line(history, plan.nodes.max, wanted)]


def earlier_runs(name: str) -> list[RunFolder]:
    """Return the newest runs of this name, newest first."""
    return [entry.folder for entry in index.of_name(name, RUNS)]


def interval_line(history: History, nodes: int, wanted: Checkpoint) -> str:
    """checkpoint interval  12m suggested (stall 0.4 s, 1 failure in 310 node-hours over 5 runs, ...; now 30m)."""
    # One save at a time: a shorter interval than a save takes cannot be had.
    seconds = max(best_interval(history.stall, between_failures(history, nodes)), history.write, SHORTEST)
    hours = f"{history.node_hours:,.0f}" if history.node_hours >= 10 else f"{history.node_hours:.1f}"
    if history.node_hours < 0.1:
        hours = "less than 0.1"
    seen = f"in {hours} node-hours over {history.runs} run{'s' * (history.runs != 1)}"
    count = f"{history.failures or 'no'} failure{'s' * (history.failures > 1)}"
    seen = f"{count} {seen}, assuming one per {between_failures(history, 1) / 3600:,.0f} node-hours"
    now = [duration(wanted.interval)] if wanted.interval else []
    now += [f"every {wanted.every_steps} steps"] if wanted.every_steps else []
    return (
        f"checkpoint interval {duration(seconds)} suggested (stall {history.stall:.2g} s, {seen};"
        f" now {' or '.join(now) or 'only at the end'})"
    )


def duration(seconds: float) -> str:
    """Return a duration as `checkpoint.interval` accepts it, rounded: 45s, 12m, 1h30m."""
    if seconds < 90:
        return f"{max(round(seconds), 1)}s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes}m"
    hours, minutes = divmod(round(minutes / 15) * 15, 60)
    return f"{hours}h{minutes}m" if minutes else f"{hours}h"


def measured(folders: Iterable[RunFolder], now: float) -> History | None:
    """Return what these runs measured; None if none of them has saved. now: unix seconds."""
    stalls: list[float] = []
    writes: list[float] = []
    runs = failures = 0
    hours = 0.0
    for folder in folders:
        try:
            events = read_events(folder.events, folder.path).records
            signs = [path for path in (folder.events, folder.metrics) if path.exists()]
            silent = now - max((path.stat().st_mtime for path in signs), default=0.0) > SILENCE
        except OSError:
            continue
        saved = [facts for _, facts in of(events, CheckpointSaved)]
        costs = [facts.seconds if facts.stall is None else facts.stall for facts in saved]
        stalls += [cost for cost in costs if cost is not None and cost >= 0]
        writes += [facts.seconds for facts in saved if facts.seconds is not None and facts.seconds >= 0]
        died, lasted = _attempts(events, silent)
        failures += died
        hours += lasted
        runs += lasted > 0
    if not stalls or not hours:
        return None
    return History(runs, statistics.median(stalls), statistics.median(writes or stalls), failures, hours)


def _attempts(events: Sequence[Event], silent: bool) -> tuple[int, float]:
    """Failures, and node-hours from each attempt's first step to its last sign of life."""
    by_attempt: dict[int, list[Event]] = {}
    for event in events:
        if event.attempt is not None and event.time is not None:
            by_attempt.setdefault(event.attempt, []).append(event)
    cancelled = any(True for _ in of(events, CancelRequested))
    failures, hours = 0, 0.0
    for attempt, mine in by_attempt.items():
        first = next((event for event, _ in of(mine, FirstStep)), None)
        if first is None:
            continue  # it ended before it trained: a mistake in the job, mostly
        started = [facts for _, facts in of(mine, Started)]
        nodes = next((facts.nodes for facts in started if facts.nodes is not None), 1)
        hours += max((mine[-1].time or 0) - (first.time or 0), 0.0) / 3600 * nodes
        # torchrun starts the ranks anew within an attempt: each time but the first was a failure.
        failures += max(len(started) - 1, 0)
        over = attempt != max(by_attempt) or silent or newest(mine, JobEnded) is not None
        if over and newest(mine, Finished) is None:
            failures += not _asked_to_end(mine, cancelled and attempt == max(by_attempt))
    return failures, hours


def _asked_to_end(events: Sequence[Event], cancelled: bool) -> bool:
    """Return whether an attempt without a clean exit was stopped on purpose, or by the job's own error."""
    own = any(facts.kind in _OWN_ERRORS for _, facts in of(events, Error))
    ended = next((facts for _, facts in of(events, JobEnded)), None)
    return cancelled or own or (ended is not None and (JobState.of(ended.slurm_state) in _ASKED or bool(ended.signal)))
