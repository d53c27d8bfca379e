"""Evaluation over exactly so many samples of the validation set, on any number of ranks."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, repeat

import torch
import torch.distributed as dist
from torch import nn

from slurmddp.records.rank_events import Validation
from slurmddp.runtime.data import loading
from slurmddp.runtime.errors import RuntimeFailure
from slurmddp.runtime.measure.loss_accumulator import LossAccumulator
from slurmddp.runtime.parallel.model import DataRank
from slurmddp.runtime.precision import autocast
from slurmddp.runtime.tasks.protocol import Samples, Task
from slurmddp.runtime.watch.watch import Watch
from slurmddp.runtime.world import World
from slurmddp.shared import batch


@dataclass(frozen=True)
class Evaluation:
    """The result, the same on every rank. `figures`: the task's own, for people."""

    loss: float
    count: int
    samples: int
    seconds: float
    figures: dict[str, float]

    def record(self) -> Validation:
        return Validation(self.loss, self.count, self.samples, self.figures)


def evaluate(
    world: World,
    task: Task,
    model: nn.Module,
    samples: Samples,
    *,
    count: int,
    micro: int,
    workers: int,
    precision: torch.dtype,
    lockstep: bool = False,
    data: DataRank | None = None,
    watch: Watch | None = None,
) -> Evaluation | None:
    """Return mean loss over the first `count` samples of the validation set, each used once; nothing is padded.

    `model` is the bare module: a rank with fewer batches runs fewer. With `lockstep` every forward needs all
    ranks, so those run a stand-in that is not counted. `data`: the part that this rank takes; None: one of its own.
    `watch`: told of progress, and asked whether to stop; None on every rank where any of them wants to.
    Raises RuntimeFailure where the number of samples that came out of the data is not `count`.
    """
    began = time.monotonic()
    mine = data or DataRank(world.rank, world.size)
    share_buffers(model)
    sums = LossAccumulator(task, world.device, extra=1)
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), autocast(world.device, precision):
            pinned = world.device.type == "cuda"
            rounds = -(-len(batch.share(count, mine.size, 0)) // micro)  # Of rank 0, whose share is largest.
            own = list(loading.evaluation_lists(count, micro=micro, world=mine.size, rank=mine.rank))
            lists = chain(own, repeat(loading.Wanted([0], real=False), rounds - len(own) if lockstep else 0))
            batches = loading.load(task, samples, lists, rank=world.rank, workers=workers, pin_memory=pinned)
            if not _run(
                world,
                task,
                model,
                watch.follow(batches) if watch else batches,
                sums if mine.counts else None,
                rounds,
                watch,
            ):
                return None
    finally:
        model.train(training)
    totals = sums.reduce().wait()
    if totals.extra(0) != count:
        raise RuntimeFailure(f"evaluation used {totals.extra(0):.0f} samples instead of {count}", shared=True)
    if totals.not_finite or totals.count == 0:
        raise RuntimeFailure(
            f"evaluation: {totals.not_finite} micro batches have a non-finite loss ({totals.count} {task.unit} in all)",
            shared=True,
        )
    means = totals.means()
    return Evaluation(means["loss"], totals.count, count, time.monotonic() - began, task.report(means))


def _run(
    world: World,
    task: Task,
    model: nn.Module,
    batches: Iterator[loading.Micro],
    sums: LossAccumulator | None,
    rounds: int,
    watch: Watch | None,
) -> bool:
    """Add up this rank's batches, one a round. False if any rank wants to stop: on all ranks alike.

    The wish of one round is known in the next: its exchange travels while the model computes.
    """
    exchange: tuple[torch.Tensor, dist.Work] | None = None

    def asked(wish: torch.Tensor, work: dist.Work) -> bool:
        work.wait()
        return bool(wish.item())

    for _ in range(rounds):
        if watch is not None:
            watch.enter("evaluation")
        wish = torch.tensor([int(watch is not None and watch.stop.wanted())])
        work = dist.all_reduce(wish, group=world.coordination, async_op=True)
        assert work is not None
        made = next(batches, None)
        if made is not None:
            loss = task.loss(model, loading.to_device(made.data, world.device))
            if made.real and sums is not None:
                sums.add_loss(loss)
                sums.add_extra(0, len(made.ids))
        if exchange is not None and asked(*exchange):
            work.wait()
            return False
        exchange = wish, work
    if exchange is not None:
        asked(*exchange)  # Everything has been evaluated: the wish is the loop's to see.
    return True


def share_buffers(model: nn.Module) -> None:
    """Give every rank rank 0's buffers (such as running means), as DDP does before each synchronised forward."""
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
