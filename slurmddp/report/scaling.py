"""How well a run scales: its samples per second and node, against an earlier run of the same job on fewer nodes."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slurmddp.errors import UserError
from slurmddp.records.events import Event, of
from slurmddp.records.rank_events import Started
from slurmddp.records.values import number
from slurmddp.run import index, metrics
from slurmddp.run.events import read_events
from slurmddp.run.layout import RunFolder
from slurmddp.shared.files import read_json
from slurmddp.shared.units import short

#: Metrics lines of one start of the ranks that a speed needs, so that the first, slow steps do not decide.
_FEWEST = 3
#: Runs that are looked at, the newest.
_RUNS = 10
#: Keys of `train` that make runs comparable. The batch is not among them: it often grows with the nodes.
_SAME = ("task", "model", "data", "precision")


@dataclass(frozen=True)
class Speed:
    """What a run measured since its newest start. samples: per second, the median of its newest metrics lines."""

    run_id: str
    nodes: int
    samples: float


@dataclass(frozen=True)
class Scaling:
    """A run and the one that it is compared with."""

    now: Speed
    before: Speed

    @property
    def efficiency(self) -> float:
        """Return the samples per second and node, as a share of those of the run on fewer nodes."""
        return (self.now.samples / self.now.nodes) / (self.before.samples / self.before.nodes)

    def line(self) -> str:
        """Return `87 % of linear: 498 samples/s on 4 nodes, 143 on 1 (run gpt-20261120-090000-a1b2)`."""
        now, before = self.now, self.before
        return (
            f"{100 * self.efficiency:.0f} % of linear: {short(now.samples)} samples/s on {now.nodes} nodes,"
            f" {short(before.samples)} on {before.nodes} (run {before.run_id})"
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "efficiency": round(self.efficiency, 4),
            "nodes": self.now.nodes,
            "samples_per_second": self.now.samples,
            "than": {
                "run_id": self.before.run_id,
                "nodes": self.before.nodes,
                "samples_per_second": self.before.samples,
            },
        }


def find_scaling(folder: RunFolder, events: Sequence[Event]) -> Scaling | None:
    """Compare with the run on the fewest nodes among the newest runs of this name; None without one on fewer nodes.

    events: those of the run.
    """
    job = _job(folder)
    now = _speed(folder, events) if job is not None else None
    if job is None or now is None or now.nodes == 1:
        return None
    others = (entry.folder for entry in index.of_name(job["name"], _RUNS) if entry.id != folder.id)
    speeds = (_speed_of(other) for other in others if _job(other) == job)
    smaller = [speed for speed in speeds if speed is not None and speed.nodes < now.nodes]
    return Scaling(now, min(smaller, key=lambda speed: speed.nodes)) if smaller else None


def _job(folder: RunFolder) -> dict[str, Any] | None:
    """Return what has to be the same; None for a script of the user's own, and for a damaged file."""
    try:
        job = read_json(folder.job_json, folder.path)
        return {"name": str(job["run"]["name"]), **{key: job["train"].get(key) for key in _SAME}}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _speed_of(folder: RunFolder) -> Speed | None:
    try:
        return _speed(folder, read_events(folder.events, folder.path).records)
    except (OSError, UserError):  # a damaged run leaves the others
        return None


def _speed(folder: RunFolder, events: Sequence[Event]) -> Speed | None:
    nodes, since = next(((start.nodes, event.time) for event, start in of(events[::-1], Started)), (None, None))
    if not nodes or since is None:
        return None
    newest = [row for row in metrics.tail(folder.metrics) if (row.time or 0) > since]
    samples = [speed for row in newest if (speed := number(row.figures.get("samples_per_second")))]
    return Speed(folder.id, nodes, statistics.median(samples)) if len(samples) >= _FEWEST else None
