"""A small DDP loop that is timed and watched as the real one is: for the tests of stragglers and their benchmark."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from slurmddp.runtime.measure.straggler_detection import Notice
from slurmddp.runtime.measure.stragglers import Stragglers
from slurmddp.runtime.measure.timing import BACKWARD, DATA, FORWARD, NETWORK, OPTIMIZER, StepTimer
from slurmddp.runtime.parallel.replicating import BucketSums
from slurmddp.runtime.world import World


class Rows(Dataset[torch.Tensor]):
    """Endless rows of 256 features; `slow()` tells how many seconds one takes to read."""

    def __init__(self, slow: Callable[[], float]) -> None:
        self._slow = slow

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self._slow())
        return torch.full((128, 256), (index % 7) / 7)


def train(world: World, folder: Path, *, seconds: float, window: float, slow: Path | None = None) -> dict[str, Any]:
    """Train for so many seconds, or until the host that was slow no longer is; leaves the rank's pid in `folder`.

    `slow`: for as long as this file exists, a sample takes 30 ms to read on rank 1. It is removed, and so is `bursts`
    in `folder`, when a slow host has been noticed. Slow links are not what they cause: a probe may only meet a burst.
    """
    (folder / f"pid-{world.rank}").write_text(str(os.getpid()))
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)]), bucket_cap_mb=0.3)
    timer = StepTimer()
    sums = BucketSums(model, bf16=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3 / world.size)
    watch = Stragglers(world, timer, seconds=window)
    hurt = slow if world.rank == 1 else None
    rows = iter(DataLoader(Rows(lambda: 0.03 if hurt is not None and hurt.exists() else 0.0), batch_size=None))
    until, notices, probes, steps, mended = time.monotonic() + seconds, [], 0, 0, False
    active: set[tuple[str, str]] = set()
    for step in range(1, 10**6):
        timer.begin()
        _step(model, sums, optimizer, rows, timer)
        ended = mended and not active
        flags = torch.tensor([time.monotonic() > until or ended, watch.wants_probe], dtype=torch.float64)
        dist.all_reduce(flags)
        timer.end()
        new = watch.step()
        if flags[1] > 0:
            probes += 1
            new += watch.probe()[1]
        notices += new
        for notice in new:
            (active.add if notice.begins else active.discard)((notice.host, notice.part))
        if any(notice.begins and notice.part != "network" for notice in new):
            mended = True
            for path in (slow, folder / "bursts"):
                if path is not None:
                    path.unlink(missing_ok=True)
        if flags[0] > 0:
            steps = step
            break
    watch.close()
    whole = timer.window()
    means = {part: whole.mean(part) for part in whole.sums}
    return {"notices": notices, "probes": probes, "steps": steps, "means": means}


def _step(
    model: nn.Module,
    sums: BucketSums,
    optimizer: torch.optim.Optimizer,
    rows: Iterator[torch.Tensor],
    timer: StepTimer,
) -> None:
    batch = next(rows)
    timer.mark(DATA)
    loss = model(batch).square().mean()
    timer.mark(FORWARD)
    loss.backward()
    timer.mark(BACKWARD)
    sums.wait()
    timer.mark(NETWORK)
    optimizer.step()
    optimizer.zero_grad()
    timer.mark(OPTIMIZER)


def texts(notices: list[Notice]) -> list[tuple[bool, str, str]]:
    return [(notice.begins, notice.host, notice.part) for notice in notices]
