"""`slurmddp check --mtbf`: how much of the time trains on more and more nodes, from what earlier runs measured."""

import math
import statistics
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from slurmddp.errors import UserError
from slurmddp.job.job import Checkpoint
from slurmddp.job.plan.model import Plan
from slurmddp.report.goodput import run_ledger
from slurmddp.report.interval import best_interval, duration, earlier_runs, measured
from slurmddp.run.layout import RunFolder

#: Multiples of the job's number of nodes, one row each.
_TIMES = (1, 4, 16, 64)
#: For less than this share of the time, each term is told that alone would lead to it.
_GOAL = 0.99
_HEADER = ("NODES", "FAILURE EVERY", "USEFUL", "BEST INTERVAL", "USEFUL")


def useful_share(work: float, stall: float, recovery: float, between: float) -> float:
    """Return the share of the time that is new work, from 0 to 1. All arguments in seconds.

    work: between two checkpoints; stall: that training waits for one; recovery: from a failure to the next step;
    between: mean time between failures of the job, which come at random. Daly's complete model (FGCS 22, 2006, eq. 20).
    """
    exponent = (work + stall) / between
    if exponent + recovery / between > 600:  # no checkpoint is ever reached
        return 0.0
    return work / (between * math.exp(recovery / between) * math.expm1(exponent))


def useful_share_lines(plan: Plan, wanted: Checkpoint, mtbf: float) -> list[str]:
    """Return the lines of `slurmddp check --mtbf`. mtbf: hours between failures of one node. Raises UserError."""
    folders = earlier_runs(plan.job.name)
    history = measured(folders, time.time())
    if history is None:
        raise UserError(
            f"--mtbf: no earlier run of {plan.job.name} has saved a checkpoint, so nothing is measured",
            todo="measure it with a short run, or with `slurmddp check JOB.yaml --rehearse`",
        )
    recovery, how = _recovery(folders)
    rows, goals = [_HEADER], list[str]()
    for nodes in (plan.nodes.max * times for times in _TIMES):
        between = mtbf * 3600 / nodes
        terms = _Terms(history.stall, history.write, recovery, between)
        now = _percent(terms.share(wanted.interval)) if wanted.interval else "-"
        rows.append((str(nodes), duration(between), now, duration(terms.interval), _percent(terms.share())))
        if terms.share() < _GOAL:
            goals.append(f"  {_percent(_GOAL)} on {nodes} nodes needs {' or '.join(terms.needed())}")
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    at = f"saved every {duration(wanted.interval)}" if wanted.interval else "checkpoint.interval is not set"
    return [
        f"share of the time that trains, if each node fails once in {mtbf:,g} hours ({at}; last column: best interval)",
        *("  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows),
        f"  measured in {history.runs} run{'s' * (history.runs != 1)} of {plan.job.name}: a checkpoint stalls training"
        f" for {_seconds(history.stall)} and is written in {_seconds(history.write)}; {how}",
        *goals,
    ]


class _Terms(NamedTuple):
    """What the share depends on, in seconds."""

    stall: float
    write: float
    recovery: float
    between: float

    @property
    def interval(self) -> float:
        """The best one."""
        return max(best_interval(self.stall, self.between), self.write)

    def share(self, interval: float | None = None) -> float:
        """The share at this interval, or at the best one. A failure also loses a save that is still being written."""
        work = self.interval if interval is None else interval
        return useful_share(work, self.stall, self.recovery + self.write, self.between)

    def needed(self) -> list[str]:
        """What each term would have to be for _GOAL while the others stay: those that can lead to it alone."""
        found = []
        for name in ("stall", "write", "recovery"):
            if self._replace(**{name: 0.0}).share() >= _GOAL:
                now, least = getattr(self, name), self._last_good(name, 0.0)
                found.append(f"a {name} of {_seconds(least)} (now {_seconds(now)})")
        rarer = self._last_good("between", self.between * 1e6)
        return [*found, f"a failure every {duration(rarer)} (now {duration(self.between)})"]

    def _last_good(self, name: str, best: float) -> float:
        """Return the value of this term that is next to today's and leads to _GOAL, as `best` does."""
        worst: float = getattr(self, name)
        for _ in range(100):
            middle = (best + worst) / 2
            best, worst = (middle, worst) if self._replace(**{name: middle}).share() >= _GOAL else (best, middle)
        return best


def _recovery(folders: Iterable[RunFolder]) -> tuple[float, str]:
    """Return the seconds from a failure to the next step, and how they are known: `a recovery takes 21 s (3 seen)`."""
    gaps: list[float] = []
    starts: list[float] = []
    for folder in folders:
        with suppress(OSError, UserError):  # one damaged run leaves the others
            found = run_ledger(folder, going=False)
            if found is not None and found.rank_starts:
                gaps += [each.milliseconds / 1000 for each in found.recoveries if each.failed]
                starts.append((found.spent["image"] + found.spent["init"]) / 1000 / found.rank_starts)
    if gaps:
        return (seconds := statistics.median(gaps)), f"a recovery takes {_seconds(seconds)} ({len(gaps)} seen)"
    seconds = statistics.median(starts or [0.0])
    return seconds, f"no recovery was seen, so a start counts as one: {_seconds(seconds)}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 10 else f"{seconds:.2g} s"
