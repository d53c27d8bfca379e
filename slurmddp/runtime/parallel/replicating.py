"""The whole model on every rank: DDP."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from slurmddp.runtime.job import Ddp
from slurmddp.runtime.measure.meter import Pending, Vector
from slurmddp.runtime.parallel import mesh
from slurmddp.runtime.parallel.buckets import Buckets, OnBucket
from slurmddp.runtime.parallel.carrier import MOST_RANKS, Carried, Carrier
from slurmddp.runtime.parallel.model import Parallel, norms
from slurmddp.runtime.world import World

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
        compressed = options.compression == "bf16"
        on_cpu = world.device.type == "cpu"
        carries = not compressed and on_cpu and 1 < world.size <= MOST_RANKS and _all_fp32(bare)
        self._carrier = Carrier(bare) if carries else None
        self._ddp = DistributedDataParallel(
            bare if self._carrier is None else self._carrier.module,
            device_ids=None if on_cpu else [world.device],
            gradient_as_bucket_view=True,
            static_graph=options.static_graph,
            # DDP's own default makes the first bucket a small one, which its number does not.
            bucket_cap_mb=None if options.bucket_mb == _DEFAULT_BUCKET_MB else options.bucket_mb,
        )
        self._buckets = Buckets(self._ddp, world.device, on_bucket, bf16=compressed)
        self.model = self._ddp

    def exchanging(self, last: bool) -> AbstractContextManager[Any]:
        """Gradients add up on this rank until the last micro batch."""
        return nullcontext() if last else self._ddp.no_sync()

    def reduce(self, vector: Vector) -> Pending | Carried:
        """On a CPU the vector goes along with the gradients."""
        values = vector.values() if self._carrier is not None else []
        if self._carrier is None or len(values) > self._carrier.ROOM:
            return vector.reduce()
        return self._carrier.load(values)

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """The last pass ends when all buckets are there."""
        carrier = self._carrier if last else None
        super().backward(loss if carrier is None else carrier.laden(loss), last)
        self._buckets.arrive()
        if carrier is not None:
            carrier.unload()

    def gradients(self) -> list[torch.Tensor]:
        """On a CPU pieces of whole buckets, where they can be had: fewer tensors than one for each parameter."""
        pieces = self._buckets.pieces(self._parameters)
        return super().gradients() if pieces is None else pieces

    def _norm(self, gradients: list[torch.Tensor]) -> float:
        return float(torch.linalg.vector_norm(norms(gradients))) if gradients else 0.0


def _all_fp32(model: nn.Module) -> bool:
    return all(item.dtype == torch.float32 for item in model.parameters() if item.requires_grad)
