"""The memory of a training process: ours over a bare DDP loop, each alone in its processes, in turn.

    python -m benchmarks.memory [--pairs N]

Ours saves a checkpoint on the way: one staging copy of this rank's part of the state is allowed for, and 2 % besides.
Exit code 1 where that is missed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.measure import Comparison
from benchmarks.step import make_job, measured

RANKS = 2
TARGET = 1.02
#: About 114 million parameters: 1.4 GB of weights and moments.
SIZE = {"model": {"layers": 4, "heads": 8, "width": 1536}, "context": 64, "micro": 1}
STEPS = 4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    options = parser.parse_args()
    job = make_job(SIZE, RANKS)
    job["checkpoint"]["every_steps"] = STEPS
    ours, theirs = [], []
    for _ in range(options.pairs):
        ours.append((_peak(job, "ours") - _staging()) / 2**20)
        theirs.append(_peak(job, "bare") / 2**20)
    result = Comparison("peak resident memory of a rank, without the staging copy", "MiB", ours, theirs, TARGET)
    print(f"the staging copy: {_staging() / 2**20:.0f} MiB\n{result.report()}")
    return 0 if result.holds else 1


def _peak(job: dict[str, object], loop: str) -> int:
    wanted = {"pairs": 2, "block": STEPS, "loops": [loop]}
    found: int = measured(Path(sys.executable), job, wanted, RANKS)["peak"]
    return found


def _staging() -> int:
    """Bytes of one rank's part: weights and two moments in fp32, dealt to the ranks."""
    from slurmddp.runtime.tasks.gpt import GPT

    model = GPT(context=SIZE["context"], dropout=0.0, tied=True, **SIZE["model"])  # type: ignore[arg-type]
    return sum(item.numel() for item in model.parameters()) * 12 // RANKS


if __name__ == "__main__":
    sys.exit(main())
