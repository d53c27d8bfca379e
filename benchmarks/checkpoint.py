"""For how long a checkpoint holds up the steps, and the memory that it takes; two ranks with gloo on this machine.

    python -m benchmarks.checkpoint [--pairs N] [--megabytes N ...] [--folder DIR] [--write]

Against gathering the state and torch.save, copying the state once in memory, and DCP's own async_save; all in the
same processes, in turn, each with nothing else under way. Then what a save costs a training in all, stall and slower
steps, ours against DCP's. Exit code 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import environments, page
from benchmarks.environments import CHECKOUT
from benchmarks.measure import Comparison

RANKS = 2
MEGABYTES = (400, 1600)
GATHER_TARGET = 0.1
COPY_TARGET = 1.5
#: Beside the one copy, as a part of the state.
MEMORY_TARGET = 0.02


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description="The stall of a checkpoint.")
    parser.add_argument("--pairs", type=int, default=7, metavar="N", help="default: %(default)s")
    parser.add_argument("--megabytes", type=int, nargs="*", default=MEGABYTES, metavar="N", help="sizes of the state")
    parser.add_argument("--folder", type=Path, help="on a real disk (default: that of temporary files)")
    page.options(parser)
    options = parser.parse_args()
    figures: list[page.Figure] = []
    for size in options.megabytes:
        with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=options.folder) as folder:
            found = measured(Path(folder), size, options.pairs)
        figures += report(size, found)
    about = f"{environments.versions(Path(sys.executable), 'torch')}; {RANKS} ranks with gloo, {options.pairs} pairs"
    return page.finish("checkpoint", figures, about, write=options.write)


def measured(folder: Path, size: int, pairs: int) -> dict[str, Any]:
    """What the ranks found. Raises CalledProcessError where one fails; its words are on stderr."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    command += ["-m", "benchmarks.checkpoint_rank", str(folder), str(size), str(pairs)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(CHECKOUT)}
    subprocess.run(command, cwd=CHECKOUT, env=variables, check=True)
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


def report(size: int, found: dict[str, Any]) -> list[page.Figure]:
    """Print what is known of one size of the state, and return its rows of the page."""
    ours = found["ours"]
    title = f"{size} MB: stall of the slower rank, over"
    both = [
        Comparison(f"{title} gather + torch.save", "ms", ours, found["gather"], GATHER_TARGET),
        Comparison(f"{title} one copy in memory", "ms", ours, found["copy"], COPY_TARGET),
    ]
    if "dcp" in found:
        both.append(Comparison(f"{title} DCP async_save", "ms", ours, found["dcp"]))
    print(f"\n{size} MB: the whole save took {statistics.median(found['seconds']):.2f} s")
    print(f"\n{_whole_cost(size, found)}")
    beside = []
    for rank, (rise, staged, state) in enumerate(found["memory"]):
        beside.append(100 * (rise - staged) / state)
        print(
            f"  memory of rank {rank}: {rise / 1e6:.0f} MB above the {state / 1e6:.0f} MB of state, of which the copy "
            f"is {staged / 1e6:.0f}"
        )
    sys.stdout.flush()
    memory = page.Figure(f"{size} MB: memory beside the copy, of the state", beside, "%", 100 * MEMORY_TARGET)
    return [*(page.Figure.of(one.title, one) for one in both), memory]


def _whole_cost(size: int, found: dict[str, Any]) -> str:
    """What a save adds to the steps among which it happens, in all, over the same steps without one."""
    alone = found["steps_alone"]
    added = {
        name: [took - without for took, without in zip(found[f"steps_{name}"], alone, strict=True)]
        for name in ("ours", "dcp")
        if f"steps_{name}" in found
    }
    title = f"{size} MB of state: what a save adds to {found['steps']} steps of {alone[0] / found['steps']:.1f} ms"
    if "dcp" not in added:
        return f"{title}: {statistics.median(added['ours']):.0f} ms"
    text = Comparison(f"{title}, ours / DCP async_save", "ms", added["ours"], added["dcp"]).report()
    return f"{text}\n  of all saves {found['late']} were not over with the steps"


if __name__ == "__main__":
    sys.exit(main())
