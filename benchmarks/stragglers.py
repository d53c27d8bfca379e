"""How often clean runs are said to have a straggler: false alarms, which should be none.

    python -m benchmarks.stragglers [--runs N] [--seconds S]

Three ranks train a small model under DDP, timed and watched as the real loop is, each rank a host of its own; nothing
is slowed down. A notice that begins is a false alarm; probes of the links are counted apart. At the end come runs with
a slow dataset on one host, in which a straggler should be found each time. Exit code 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.runtime import timed
from tests.runtime.harness import Ranks

RANKS = 3
SLOW_RUNS = 3


def train(world: Any, folder: Path, seconds: float, slow: Path | None) -> dict[str, Any]:
    """One run, with windows of the length that real runs have."""
    return timed.train(world, folder, seconds=seconds, window=1.0, slow=slow)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stragglers", description="False alarms in clean runs.")
    parser.add_argument("--runs", type=int, default=20, metavar="N", help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=15.0, metavar="S", help="of a run; default: %(default)s")
    options = parser.parse_args()
    ranks = Ranks(RANKS)
    try:
        alarms, probes = _clean(ranks, options.runs, options.seconds)
        found = _slow(ranks, SLOW_RUNS, 4 * options.seconds)
    finally:
        ranks.close()
    print(f"clean runs, {options.runs} of {options.seconds:.0f} s: {alarms} false alarms, {probes} probes of the links")
    print(f"runs with a slow dataset on node1, {SLOW_RUNS}: {found} found, and nothing else said")
    return 0 if alarms == 0 and found == SLOW_RUNS else 1


def _clean(ranks: Ranks, runs: int, seconds: float) -> tuple[int, int]:
    """False alarms and probes."""
    alarms = probes = 0
    for number in range(1, runs + 1):
        with tempfile.TemporaryDirectory() as folder:
            result = ranks(RANKS, train, Path(folder), seconds, None, timeout=seconds + 60)[0]
        begun = [notice for notice in result["notices"] if notice.begins]
        alarms, probes = alarms + len(begun), probes + result["probes"]
        parts = ", ".join(f"{part} {1000 * mean:.2f}" for part, mean in result["means"].items())
        print(f"run {number}: {result['steps']} steps, ms a step on rank 0: {parts}", file=sys.stderr, flush=True)
        for notice in begun:
            print(f"run {number}: {notice.text()}", file=sys.stderr, flush=True)
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", file=sys.stderr, flush=True)
    return alarms, probes


def _slow(ranks: Ranks, runs: int, seconds: float) -> int:
    """Runs in which the slow dataset was named, and nothing else."""
    found = 0
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            slow = Path(folder) / "slow"
            slow.touch()
            result = ranks(RANKS, train, Path(folder), seconds, slow, timeout=seconds + 60)[0]
        begun = [(notice.host, notice.part) for notice in result["notices"] if notice.begins]
        found += begun == [("node1", "data")]
        for notice in result["notices"]:
            print(f"slow dataset: {notice.text()}", file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
