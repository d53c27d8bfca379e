"""How long the checkpoints of a run took to save."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from slurmddp.records.events import of
from slurmddp.records.rank_events import CheckpointSaved
from slurmddp.run.events import read_events
from slurmddp.run.layout import RunFolder


def longest_save(runs: Iterable[Path]) -> float | None:
    """Return seconds that the slowest save in these run folders took; None if none has told of one."""
    longest: float | None = None
    for run in runs:
        try:
            events = read_events(RunFolder(run).events, run).records
        except OSError:
            continue  # a run that cannot be read plans nothing
        for _, saved in of(events, CheckpointSaved):
            if saved.seconds is not None and saved.seconds >= 0:
                longest = max(saved.seconds, longest or 0.0)
    return longest
