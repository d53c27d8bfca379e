"""For how long a checkpoint holds up the steps, and the memory that it takes; two ranks with gloo on this machine.

    python -m benchmarks.checkpoint [--pairs N] [--megabytes N ...] [--folder DIR]

Against gathering the state and torch.save, copying the state once in memory, and DCP's own async_save; all in the
same processes, in turn, each with nothing else under way. Exit code 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    options = parser.parse_args()
    good = True
    for size in options.megabytes:
        with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=options.folder) as folder:
            found = measured(Path(folder), size, options.pairs)
        good = report(size, found) and good
    return 0 if good else 1


def measured(folder: Path, size: int, pairs: int) -> dict[str, Any]:
    """What the ranks found. Raises CalledProcessError where one fails; its words are on stderr."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    command += ["-m", "benchmarks.checkpoint_rank", str(folder), str(size), str(pairs)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(CHECKOUT)}
    subprocess.run(command, cwd=CHECKOUT, env=variables, check=True)
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


def report(size: int, found: dict[str, Any]) -> bool:
    """Print the figures of one size; whether the targets hold."""
    ours = found["ours"]
    title = f"{size} MB of state: stall of the slower rank, ours /"
    both = [
        Comparison(f"{title} gather + torch.save", "ms", ours, found["gather"], GATHER_TARGET),
        Comparison(f"{title} one copy in memory on one rank", "ms", ours, found["copy"], COPY_TARGET),
    ]
    if found["dcp"]:
        both.append(Comparison(f"{title} DCP async_save", "ms", ours, found["dcp"]))
    for one in both:
        print(f"\n{one.report()}")
    print(f"  the whole save took {statistics.median(found['seconds']):.2f} s")
    fits = True
    for rank, (rise, staged, state) in enumerate(found["memory"]):
        part = (rise - staged) / state
        fits = fits and part <= MEMORY_TARGET
        print(
            f"  memory of rank {rank}: {rise / 1e6:.0f} MB above the {state / 1e6:.0f} MB of state, of which the copy "
            f"is {staged / 1e6:.0f}; beside it {part:.1%}, target {MEMORY_TARGET:.0%}: "
            f"{'holds' if part <= MEMORY_TARGET else 'MISSED'}"
        )
    sys.stdout.flush()
    return fits and all(one.holds for one in both)


def rank(folder: Path, size: int, pairs: int) -> None:
    """On each rank."""
    import torch.distributed as dist

    from slurmddp.runtime import environment, world

    joined = world.start(environment.read(), timeout=600)
    bench = Bench(joined, folder, size)
    memory = bench.memory()
    ways: dict[str, Callable[[], float]] = {
        "ours": bench.ours,
        "copy": bench.copy,
        "gather": bench.gather,
        "dcp": bench.dcp,
    }
    found: dict[str, Any] = {name: [] for name in ways}
    for number in range(pairs + 1):
        for name, way in ways.items():
            if joined.is_main:
                os.sync()  # What others wrote is not ours to wait for.
            joined.gather(None)
            stall = max(joined.gather(way()))
            if number and stall:
                found[name].append(stall * 1000)
    if joined.is_main:
        found |= {"memory": memory, "seconds": bench.seconds}
        (folder / "found.json").write_text(json.dumps(found))
    bench.writer.close()
    dist.destroy_process_group()


class Bench:
    """A state of `size` MB as AdamW leaves it: weights and two moments; the ways to save it."""

    def __init__(self, joined: Any, folder: Path, size: int) -> None:
        import torch
        from torch import nn

        from slurmddp.runtime.checkpoint import state
        from slurmddp.runtime.checkpoint.writer import Writer

        torch.set_num_threads(1)
        self.joined, self.folder, self.step, self.seconds = joined, folder, 0, []
        layers, width = 24, 256
        rows = size * 1_000_000 // (3 * 4 * layers * width * joined.size) * joined.size
        model = nn.ParameterList([nn.Parameter(torch.randn(rows, width)) for _ in range(layers)])
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.1)
        optimizer.step()
        optimizer.zero_grad()
        self.trained = state.Trained(model, optimizer, torch.amp.GradScaler("cpu", enabled=False))
        self.tensors = state.collect(self.trained)
        self.bytes = sum(tensor.nbytes for tensor in self.tensors.values())
        self.writer = Writer(folder / "ours", joined, keep=1, config="", rejected=[])
        self.memory_copy: list[Any] = []

    def memory(self) -> list[tuple[int, int, int]]:
        """Two saves of ours: by how much the peak rose, how much of it is the copy, and the state; by rank."""
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        self.writer.prepare(self.trained)
        self.ours()
        self.ours()
        staged = self.writer._staging.bytes  # type: ignore[union-attr]
        found: list[tuple[int, int, int]] = self.joined.gather((_status("VmHWM") - before, staged, self.bytes))
        return found

    def ours(self) -> float:
        from slurmddp.runtime.checkpoint.writer import Saved

        self.step += 1
        stall = self.writer.begin(self.trained, step=self.step, data={"global_batch": 1})
        (saved,) = self.writer.finish()
        assert isinstance(saved, Saved), saved
        self.seconds.append(saved.seconds)
        return stall

    def copy(self) -> float:
        """The whole state, into memory that is there, on rank 0."""
        import torch

        if not self.joined.is_main:
            return 0.0
        self.memory_copy = self.memory_copy or [tensor.detach().clone() for tensor in self.tensors.values()]
        began = time.monotonic()
        torch._foreach_copy_(self.memory_copy, [tensor.detach() for tensor in self.tensors.values()])
        return time.monotonic() - began

    def gather(self) -> float:
        """Each rank's share of every tensor to rank 0, which saves the whole; the others wait."""
        import torch
        import torch.distributed as dist

        path, whole = self.folder / "model.pt", {}
        began = time.monotonic()
        for name, tensor in self.tensors.items():
            if tensor.dim() == 0:
                whole[name] = tensor
                continue
            share = tensor.detach().tensor_split(self.joined.size)[self.joined.rank].contiguous()
            shares = None
            if self.joined.is_main:
                shares = [torch.empty_like(part) for part in tensor.detach().tensor_split(self.joined.size)]
            dist.gather(share, shares)
            if shares is not None:
                whole[name] = torch.cat(shares)
        if self.joined.is_main:
            torch.save(whole, path)
        dist.barrier()
        stall = time.monotonic() - began
        if self.joined.is_main:
            path.unlink()
        return stall

    def dcp(self) -> float:
        """torch's own; 0 where it does not work (it needs numpy)."""
        import torch.distributed.checkpoint as dcp

        try:
            began = time.monotonic()
            future = dcp.async_save(
                self.tensors, checkpoint_id=self.folder / "dcp", process_group=self.joined.coordination
            )
            stall = time.monotonic() - began
            future.result()
        except (ImportError, RuntimeError, AttributeError) as error:
            print(f"DCP's async_save does not work here: {error}", file=sys.stderr)
            return 0.0
        self.joined.gather(None)
        if self.joined.is_main:
            shutil.rmtree(self.folder / "dcp")
        return stall


def _status(key: str) -> int:
    """A line of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


if __name__ == "__main__":
    sys.exit(main())
