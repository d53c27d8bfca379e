"""Evaluation over exactly so many held-out samples, on any number of ranks."""

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from slurmddp.runtime import loading
from slurmddp.runtime.errors import RuntimeFailure
from slurmddp.runtime.step import autocast
from slurmddp.runtime.sums import Sums
from slurmddp.runtime.tasks.protocol import Samples, Task
from slurmddp.runtime.world import World


@dataclass(frozen=True)
class Evaluation:
    """The result, the same on every rank. `figures`: the task's own, for people."""

    loss: float
    count: int
    samples: int
    seconds: float
    figures: dict[str, float]

    def record(self) -> dict[str, float | int]:
        """As it stands in events and markers."""
        return {"loss": self.loss, "count": self.count, "samples": self.samples, **self.figures}


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
) -> Evaluation:
    """Mean loss over the first `count` held-out samples, each used once; nothing is padded.

    `model` is the bare module: a rank with fewer batches runs fewer, and there is one reduction at the end.
    Raises RuntimeFailure where the number of samples that came out of the data is not `count`.
    """
    began = time.monotonic()
    share_buffers(model)
    lists = loading.evaluation_lists(count, micro=micro, world=world.size, rank=world.rank)
    sums = Sums(task, world.device, extra=1)
    training = model.training
    model.eval()
    with torch.no_grad(), autocast(world.device, precision):
        pinned = world.device.type == "cuda"
        for batch in loading.load(task, samples, lists, rank=world.rank, workers=workers, pin_memory=pinned):
            sums.add_loss(task.loss(model, loading.to_device(batch.data, world.device)))
            sums.add_extra(0, len(batch.ids))
    model.train(training)
    totals = sums.reduce().wait()
    if totals.extra(0) != count:
        raise RuntimeFailure(f"evaluation used {totals.extra(0):.0f} samples instead of {count}", shared=True)
    if totals.not_finite or totals.count == 0:
        raise RuntimeFailure(
            f"evaluation: {totals.not_finite} micro batches have a loss that is not finite, of "
            f"{totals.count} "
            f"{task.unit} in all",
            shared=True,
        )
    means = totals.means()
    return Evaluation(means["loss"], totals.count, count, time.monotonic() - began, task.report(means))


def share_buffers(model: nn.Module) -> None:
    """Give every rank rank 0's buffers (running means and the like), as DDP does before each synchronised
    forward.
    """
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
