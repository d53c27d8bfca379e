"""The whole model on every rank: DDP."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from slurmddp.runtime.job import Ddp
from slurmddp.runtime.parallel.buckets import BucketSums, OnBucket
from slurmddp.runtime.parallel.model import Parallel, norms
from slurmddp.runtime.world import World
from slurmddp.shared import mesh

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
