"""The whole model on every rank: DDP."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from slurmddp.runtime.job import Ddp
from slurmddp.runtime.parallel.model import Parallel, norms
from slurmddp.runtime.world import World
from slurmddp.shared import mesh

#: Gets the number of a gradient bucket that is ready, whose exchange starts now, and whether it is a step's last one.
#: DDP calls it within the backward pass: it has to be quick, and must not raise.
OnBucket = Callable[[int, bool], None]

Future = torch.futures.Future[torch.Tensor]


class BucketSums:
    """Adds up each bucket of DDP over all ranks as soon as it is ready, without dividing: rounding is as in one
    process.
    """

    def __init__(self, model: DistributedDataParallel, on_bucket: OnBucket | None, *, bf16: bool) -> None:
        """Register the hook. With `bf16` the ranks exchange bf16, half the bytes."""
        self._on_bucket = on_bucket
        self._bf16 = bf16
        self._begun: list[tuple[dist.Work, torch.Tensor, torch.Tensor]] = []
        # Kept until the next pass: gloo's thread, if it is the last to hold a tensor, needs the interpreter to free it.
        self._ended: list[tuple[dist.Work, torch.Tensor, torch.Tensor]] = []
        model.register_comm_hook(self, _begin)

    def wait(self) -> None:
        """Wait for the sums that are still on their way; after each backward pass that exchanges gradients."""
        for work, sent, gradients in self._begun:
            work.wait()
            if sent is not gradients:
                gradients.copy_(sent)
        self._begun, self._ended = [], self._begun

    def begin(self, bucket: dist.GradBucket) -> Future:
        """Start the all-reduce of a bucket, for the hook.

        On a CPU, tell DDP at once that it is done, which moves no number, since gradients are views of the buckets. A
        callback would run in gloo's thread, and would need the interpreter there. With torch 2.4 the end of a process
        group waits for that thread and keeps the interpreter meanwhile.
        """
        if self._on_bucket is not None:
            self._on_bucket(bucket.index(), bucket.is_last())
        gradients: torch.Tensor = bucket.buffer()
        sent = gradients.to(torch.bfloat16) if self._bf16 else gradients
        work = dist.all_reduce(sent, async_op=True)
        assert work is not None
        if gradients.device.type != "cpu":
            future: Future = work.get_future()
            return future.then(lambda done: gradients.copy_(_first(done)) if self._bf16 else _first(done))
        self._begun.append((work, sent, gradients))
        done = Future()
        done.set_result(gradients)
        return done


def _begin(sums: BucketSums, bucket: dist.GradBucket) -> Future:
    return sums.begin(bucket)


def _first(future: Future) -> torch.Tensor:
    return future.value()[0]


#: What DDP takes where it is given nothing.
_DEFAULT_BUCKET_MB = 25.0


class Replicated(Parallel):
    """The whole model on every rank, gradients summed up in buckets while the backward pass runs: DDP."""

    lockstep = False
    divides_by = 1

    def __init__(self, bare: nn.Module, world: World, options: Ddp, on_bucket: OnBucket | None) -> None:
        """Moves the model to the rank's device, and gives all ranks rank 0's weights."""
        self.module = bare.to(world.device)
        self._parameters = list(bare.parameters())
        self.mesh = mesh.sizes(world.size, None, 1)
        self._ddp = DistributedDataParallel(
            bare,
            device_ids=None if world.device.type == "cpu" else [world.device],
            gradient_as_bucket_view=True,
            static_graph=options.static_graph,
            # DDP's own default makes the first bucket a small one, which its number does not.
            bucket_cap_mb=None if options.bucket_mb == _DEFAULT_BUCKET_MB else options.bucket_mb,
        )
        self._sums = BucketSums(self._ddp, on_bucket, bf16=options.compression == "bf16")
        self.model = self._ddp

    def exchanging(self, last: bool) -> AbstractContextManager[Any]:
        """Gradients add up on this rank until the last micro batch."""
        return nullcontext() if last else self._ddp.no_sync()

    def backward(self, loss: torch.Tensor) -> None:
        """The last pass ends when all buckets are there."""
        super().backward(loss)
        self._sums.wait()

    def _norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return torch.linalg.vector_norm(norms(gradients)) if gradients else torch.zeros(())
