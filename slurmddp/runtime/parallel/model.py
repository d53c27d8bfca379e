"""How ranks share the model: whole on each of them (DDP), in shards (FSDP), or replicas of shards (HSDP).

What the stepper sees is the same for all: a `Parallel`.
"""

import math
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from slurmddp.runtime.errors import UserError
from slurmddp.runtime.job import Ddp, Job
from slurmddp.runtime.measure.meter import Pending, Vector
from slurmddp.runtime.parallel import mesh, shaping
from slurmddp.runtime.parallel.buckets import Buckets, OnBucket
from slurmddp.runtime.parallel.carrier import MOST_RANKS, Carried, Carrier
from slurmddp.runtime.world import World

_EPSILON = 1e-6  # As in torch's clip_grad_norm_.


class Parallel(ABC):
    """A model that all ranks train together.

    `module`: the parameters as the optimizer and checkpoints see them, with the model's own names (DTensors where
    they are sharded). `model`: what a task's loss calls. `divides_by`: what the exchange divides the sum of the ranks'
    gradients by. `lockstep`: every forward needs all ranks, so all have to run the same number of them. `mesh`: its
    sizes by dimension, outermost first.
    """

    module: nn.Module
    model: nn.Module
    divides_by: int
    lockstep: bool
    mesh: dict[str, int]
    _parameters: list[nn.Parameter]

    def groups(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """For each dimension of the mesh the groups of ranks along it."""
        return mesh.groups(self.mesh)

    def process_groups(self) -> list[dist.ProcessGroup]:
        """Those of the mesh, besides the world's own."""
        return []

    @abstractmethod
    def exchanging(self, last: bool) -> AbstractContextManager[Any]:
        """The context for forward and backward of one micro batch."""

    def reduce(self, vector: Vector) -> Pending | Carried:
        """Start adding up a vector over all ranks. Right before the backward pass of a step's last micro batch; wait
        for it after that pass.
        """
        return vector.reduce()

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """Differentiate a micro batch's loss, in `exchanging(last)`. After the last one gradients are all ranks'."""
        loss.backward()  # type: ignore[no-untyped-call]

    def clear_gradients(self) -> None:
        """Forget them, before a step. As the optimizer's zero_grad, in a tenth of its time."""
        for parameter in self._parameters:
            parameter.grad = None

    def gradients(self) -> list[torch.Tensor]:
        """This rank's part of the gradients, for changes in place: plain tensors."""
        return [local(item.grad) for item in self._parameters if item.grad is not None]

    def finish_gradients(self, scale: float, largest: float) -> float:
        """Multiply gradients by `scale`, clip them to the global norm `largest` (infinity: no clipping), in one go.

        Returns the norm after scaling and before clipping, the same on every rank; every rank has to call it. Where
        it is not finite, gradients are left as they are.
        """
        gradients = self.gradients()
        norm = scale * self._norm(gradients)
        if math.isfinite(norm):
            factor = scale * min(1.0, largest / (norm + _EPSILON))
            if factor != 1.0 and gradients:
                torch._foreach_mul_(gradients, factor)
        return norm

    def rest(self) -> None:  # noqa: B027 - nothing to do where nothing is gathered
        """Give back what a forward without a backward pass has gathered. Call it after an evaluation."""

    @abstractmethod
    def _norm(self, gradients: list[torch.Tensor]) -> float: ...


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


def wrap(bare: nn.Module, job: Job, world: World, on_bucket: OnBucket | None = None) -> Parallel:
    """Make `bare`, built alike on every rank and on the CPU, what the job asks for; every rank has to call it.

    Build the optimizer afterwards, from the result's `module`. `on_bucket` hears of DDP's buckets; shards have none.
    Raises a shared UserError for what the user can put right.
    """
    try:
        sizes = mesh.sizes(world.size, job.parallel.replicate, job.parallel.shard)
    except ValueError as error:
        raise UserError(str(error), shared=True) from error
    sharded = sizes[mesh.SHARD] > 1
    if not sharded:
        bare.to(world.device)
    shaping.shape(bare, job.train, world, sharded=sharded)
    if sharded:
        # Not before it is needed: a DDP run need not wait for the import of DTensors.
        from slurmddp.runtime.parallel.sharding import Sharded

        return Sharded(bare, world, sizes, job.timeouts.collective)
    return Replicated(bare, world, job.train.ddp, on_bucket)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, sharing its memory; any other tensor as it is."""
    with torch.no_grad():
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def norms(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The norm of each tensor, as one tensor."""
    return torch.stack(torch._foreach_norm(tensors)).float()


def _all_fp32(model: nn.Module) -> bool:
    return all(item.dtype == torch.float32 for item in model.parameters() if item.requires_grad)
