"""The whole model on every rank: DDP."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from slurmddp.runtime import torch_private
from slurmddp.runtime.job import Ddp
from slurmddp.runtime.measure.timing import BACKWARD, NETWORK
from slurmddp.runtime.parallel.model import Parallel, data_rank, norms
from slurmddp.runtime.parallel.waits import Mark
from slurmddp.runtime.world import World
from slurmddp.shared import mesh

Future = torch.futures.Future[torch.Tensor]


class BucketSums:
    """Adds up each bucket of DDP over all ranks as soon as it is ready, without dividing: rounding is as in one
    process. On a CPU only.
    """

    def __init__(self, model: DistributedDataParallel, *, bf16: bool) -> None:
        """Register the hook. With `bf16` the ranks exchange bf16, half the bytes."""
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

        Tell DDP at once that it is done, which moves no number, since gradients are views of the buckets. A callback
        would run in gloo's thread, and would need the interpreter there. With torch 2.4 the end of a process group
        waits for that thread and keeps the interpreter meanwhile.
        """
        gradients: torch.Tensor = bucket.buffer()
        sent = gradients.to(torch.bfloat16) if self._bf16 else gradients
        work = dist.all_reduce(sent, async_op=True)
        assert work is not None
        self._begun.append((work, sent, gradients))
        done = Future()
        done.set_result(gradients)
        return done


def _begin(sums: BucketSums, bucket: dist.GradBucket) -> Future:
    return sums.begin(bucket)


#: What DDP takes where it is given nothing.
_DEFAULT_BUCKET_MB = 25.0


class Replicated(Parallel):
    """The whole model on every rank, gradients summed up in buckets while the backward pass runs: DDP."""

    lockstep = False

    def __init__(
        self, bare: nn.Module, world: World, options: Ddp, mark: Mark | None = None, *, hooked: bool | None = None
    ) -> None:
        """Moves the model to the rank's device, and gives all ranks rank 0's weights.

        `mark`: of a timer that is told when the last gradient is computed, and when all ranks' are there.
        `hooked`: whether BucketSums exchanges the buckets, not DDP, which divides by their number; by default on a CPU.
        A GPU with a small model would wait for Python.
        """
        self.module = bare.to(world.device)
        self._parameters = list(bare.parameters())
        self.mesh = mesh.sizes(world.size, None, 1)
        self.data = data_rank(world, self.mesh)
        self._sums: BucketSums | None = None
        self.divides_by = world.size
        self._ddp = DistributedDataParallel(
            bare,
            device_ids=None if world.device.type == "cpu" else [world.device],
            gradient_as_bucket_view=True,
            static_graph=options.static_graph,
            # DDP's own default makes the first bucket a small one, which its number does not.
            bucket_cap_mb=None if options.bucket_mb == _DEFAULT_BUCKET_MB else options.bucket_mb,
        )
        bf16 = options.compression == "bf16"
        if world.device.type == "cpu" if hooked is None else hooked:
            self._sums, self.divides_by = BucketSums(self._ddp, bf16=bf16), 1
        elif bf16:
            self._ddp.register_comm_hook(None, bf16_compress_hook)
        self._mark = mark
        self.model = self._ddp

    def exchanging(self, last: bool) -> AbstractContextManager[Any]:
        """Gradients add up on this rank until the last micro batch."""
        return nullcontext() if last else self._ddp.no_sync()

    def backward(self, loss: torch.Tensor) -> None:
        """The last pass ends when all buckets are there."""
        mark = self._mark if self._ddp.require_backward_grad_sync else None
        if mark is not None:
            # Queued before DDP queues its own action at the end of the pass, which waits for the buckets.
            loss.register_hook(lambda _: torch_private.after_backward(lambda: mark(BACKWARD)))  # type: ignore[no-untyped-call]
        super().backward(loss)
        if self._sums is not None:
            self._sums.wait()
        if mark is not None:
            mark(NETWORK)

    def _norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return torch.linalg.vector_norm(norms(gradients)) if gradients else torch.zeros(())
