"""On each rank of benchmarks.checkpoint: the ways to save a state, and what they take.

Arguments: FOLDER MEGABYTES PAIRS. Rank 0 leaves FOLDER/found.json.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from slurmddp.runtime import environment, world
from slurmddp.runtime.checkpoint import state
from slurmddp.runtime.checkpoint.saving import Saved
from slurmddp.runtime.checkpoint.writer import Writer


def main(folder: Path, size: int, pairs: int) -> None:
    joined = world.start(environment.read(), timeout=600)
    bench = Bench(joined, folder, size)
    found: dict[str, Any] = {"memory": bench.memory()}
    found |= bench.stalls(pairs)
    found["seconds"] = list(bench.seconds)  # of saves with nothing else under way
    found |= bench.among_steps(pairs, statistics.median(found["seconds"]))
    if joined.is_main:
        (folder / "found.json").write_text(json.dumps(found))
    bench.writer.close()
    dist.destroy_process_group()


class Bench:
    """A state of `size` MB as AdamW leaves it: weights and two moments; the ways to save it."""

    def __init__(self, joined: Any, folder: Path, size: int) -> None:
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
        self.dcp: Any = None
        self.memory_copy: list[Any] = []
        self.operand, self.exchanged = torch.randn(640, 640), torch.zeros(1 << 16)

    def memory(self) -> list[tuple[int, int, int]]:
        """Two saves of ours: by how much the peak rose, how much of it is the copy, and the state; by rank."""
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        self.writer.prepare(self.trained)
        for _ in range(2):
            self.begin_ours()
            self.end_ours()
        staged = self.writer._staging.bytes  # type: ignore[union-attr]
        found: list[tuple[int, int, int]] = self.joined.gather((_status("VmHWM") - before, staged, self.bytes))
        return found

    def stalls(self, pairs: int) -> dict[str, list[float]]:
        """The slower rank's milliseconds, by the way to save; nothing else is under way."""

        def whole(begin: Callable[[], float], end: Callable[[], bool]) -> float:
            stall = begin()
            end()
            return stall

        ways: dict[str, Callable[[], float]] = {
            name: partial(whole, *way) for name, way in self.in_background().items()
        }
        ways |= {"copy": self.copy, "gather": self.gather}
        return self._in_turn(ways, pairs)

    def among_steps(self, pairs: int, save: float) -> dict[str, Any]:
        """The slower rank's milliseconds for as many steps as take longer than a save, by what is saved meanwhile.

        `save`: seconds that one takes alone. `late`: how many had not ended with the steps.
        """
        alone = self.steps(20, lambda: 0.0) / 20
        count, late = max(self.joined.gather(max(20, int(3 * save / alone)))), 0

        def steps(begin: Callable[[], float], end: Callable[[], bool]) -> float:
            nonlocal late
            seconds = self.steps(count, begin)
            late += max(self.joined.gather(end()))
            return seconds

        ways: dict[str, Callable[[], float]] = {"alone": lambda: self.steps(count, lambda: 0.0)}
        ways |= {name: partial(steps, *way) for name, way in self.in_background().items()}
        found = self._in_turn(ways, pairs)
        return {"steps": count, "late": late, **{f"steps_{name}": took for name, took in found.items()}}

    def _in_turn(self, ways: dict[str, Callable[[], float]], pairs: int) -> dict[str, list[float]]:
        """What each took on the slower rank, in milliseconds; the first round is for nothing."""
        found: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(pairs + 1):
            for name, way in ways.items():
                if self.joined.is_main:
                    os.sync()  # What others wrote is not ours to wait for.
                self.joined.gather(None)
                seconds = max(self.joined.gather(way()))
                if number:
                    found[name].append(seconds * 1000)
        return found

    def steps(self, count: int, save: Callable[[], float]) -> float:
        """Seconds that `count` steps take, with a save begun before them: products, and an exchange of 256 KiB."""
        self.joined.gather(None)
        began = time.monotonic()
        save()
        for _ in range(count):
            for _ in range(2):
                torch.mm(self.operand, self.operand)
            dist.all_reduce(self.exchanged)
        return time.monotonic() - began

    # --- ways to save: in the background (what begins it: the stall in seconds; what ends it: whether it had to wait)

    def in_background(self) -> dict[str, tuple[Callable[[], float], Callable[[], bool]]]:
        """DCP's own needs NumPy."""
        ways = {"ours": (self.begin_ours, self.end_ours)}
        return ways | ({"dcp": (self.begin_dcp, self.end_dcp)} if find_spec("numpy") else {})

    def begin_ours(self) -> float:
        self.step += 1
        return self.writer.begin(self.trained, step=self.step, data={"global_batch": 1})

    def end_ours(self) -> bool:
        late = self.writer.busy
        (saved,) = self.writer.finish()
        assert isinstance(saved, Saved), saved
        self.seconds.append(saved.seconds)
        return late

    def begin_dcp(self) -> float:
        began = time.monotonic()
        self.dcp = dcp.async_save(
            self.tensors, checkpoint_id=self.folder / "dcp", process_group=self.joined.coordination
        )
        return time.monotonic() - began

    def end_dcp(self) -> bool:
        late = not self.dcp.done()
        self.dcp.result()
        self.joined.gather(None)
        if self.joined.is_main:
            shutil.rmtree(self.folder / "dcp")
        return late

    # --- and with the steps standing still

    def copy(self) -> float:
        """The whole state, into memory that is there, on rank 0."""
        if not self.joined.is_main:
            return 0.0
        self.memory_copy = self.memory_copy or [tensor.detach().clone() for tensor in self.tensors.values()]
        began = time.monotonic()
        torch._foreach_copy_(self.memory_copy, [tensor.detach() for tensor in self.tensors.values()])
        return time.monotonic() - began

    def gather(self) -> float:
        """Each rank's share of every tensor to rank 0, which saves the whole; the others wait."""
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


def _status(key: str) -> int:
    """A line of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
