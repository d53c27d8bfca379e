"""How long the checkpoints of a run took to save."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from slurmddp.records.values import number
from slurmddp.runs.events import read_lines
from slurmddp.runs.layout import RunFolder


def longest_save(runs: Iterable[Path]) -> float | None:
    """Return seconds that the slowest save in these run folders took; None if none has told of one."""
    longest: float | None = None
    for run in runs:
        try:
            events = read_lines(RunFolder(run).events, run).records
        except OSError:
            continue  # a run that cannot be read plans nothing
        for event in events:
            seconds = number(event.get("seconds")) if event.get("event") == "checkpoint_saved" else None
            if seconds is not None and seconds >= 0:
                longest = max(seconds, longest or 0.0)
    return longest
