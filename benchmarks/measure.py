"""Pairs of measurements, taken in turn, and what they come to."""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Cost:
    """One run of a command, in seconds. cpu: user and system time of the process and its children; memory: MiB of the
    process at most."""

    cpu: float
    wall: float
    memory: float = 0.0


@dataclass(frozen=True)
class Comparison:
    """Ours against a peer's, pair by pair. `target`: what the median ratio may be at most."""

    title: str
    unit: str
    ours: Sequence[float]
    theirs: Sequence[float]
    target: float | None = None

    @property
    def ratios(self) -> list[float]:
        return [mine / other for mine, other in zip(self.ours, self.theirs, strict=True)]

    @property
    def holds(self) -> bool:
        return self.target is None or statistics.median(self.ratios) <= self.target

    def report(self) -> str:
        """Several lines for people."""
        lines = [
            self.title,
            f"  ours    {spread(self.ours)} {self.unit}",
            f"  theirs  {spread(self.theirs)} {self.unit}",
            f"  ratio   {spread(self.ratios)} ({len(self.ours)} pairs)",
        ]
        if (certain := interval(self.ratios)) is not None:
            lines.append(f"  median  {certain[0]:.3f} to {certain[1]:.3f} with 95 % confidence")
        if self.target is not None:
            lines.append(f"  target  at most {self.target}: {'holds' if self.holds else 'MISSED'}")
        return "\n".join(lines)


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Where the median of what `values` are drawn from lies with 95 % confidence, whatever its distribution: between
    two of the values themselves (the sign test's interval). None for fewer than six.
    """
    count, below = len(values), 0.0
    for rank in range(count // 2):
        below += math.comb(count, rank) / 2**count
        if below > 0.025:
            ordered = sorted(values)
            return (ordered[rank - 1], ordered[count - rank]) if rank else None
    return None


def run(command: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> Cost:
    """Run a command to its end, its output thrown away. Raises RuntimeError where it fails."""
    before = time.perf_counter()
    child = subprocess.Popen(
        command, cwd=cwd, env=dict(environment), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    _, status, usage = os.wait4(child.pid, 0)
    wall = time.perf_counter() - before
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {child.returncode}")
    return Cost(usage.ru_utime + usage.ru_stime, wall, usage.ru_maxrss / 1024)


def in_turn(ours: Callable[[], Cost], theirs: Callable[[], Cost], pairs: int) -> tuple[list[Cost], list[Cost]]:
    """One run of each to warm up, then A B A B ...: what else the machine does falls on both alike."""
    ours(), theirs()
    measured = [(ours(), theirs()) for _ in range(pairs)]
    return [mine for mine, _ in measured], [other for _, other in measured]


def spread(values: Sequence[float]) -> str:
    return f"min {min(values):.3f}  median {statistics.median(values):.3f}  max {max(values):.3f}"
