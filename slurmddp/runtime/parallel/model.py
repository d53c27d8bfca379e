"""What the stepper sees of a model that all ranks train, however they share it: a `Parallel`."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from slurmddp.runtime import torch_private
from slurmddp.runtime.world import World
from slurmddp.shared.mesh import TENSOR

_PIECE = 1 << 15


class DataRank(NamedTuple):
    """Which of `size` parts of each batch a rank takes. `counts`: whether it is the one whose samples are counted.

    The ranks of a tensor group take the same part, and the first of them counts it.
    """

    rank: int
    size: int
    counts: bool = True


def data_rank(world: World, mesh: Mapping[str, int]) -> DataRank:
    tensor = mesh.get(TENSOR, 1)
    return DataRank(world.rank // tensor, world.size // tensor, world.rank % tensor == 0)


class Parallel(ABC):
    """A model that all ranks train together.

    `module`: the parameters as the optimizer and checkpoints see them, with the model's own names (DTensors where
    they are sharded). `model`: what a task's loss calls. `divides_by`: what the exchange divides the sum of the ranks'
    gradients by. `lockstep`: every forward needs all ranks, so all have to run the same number of them. `mesh`: its
    sizes by dimension, outermost first. `data`: the samples of this rank.
    """

    module: nn.Module
    model: nn.Module
    divides_by: int
    lockstep: bool
    mesh: dict[str, int]
    data: DataRank
    _parameters: list[nn.Parameter]

    def process_groups(self) -> list[dist.ProcessGroup]:
        """Return the process groups of the mesh, besides that of all ranks."""
        return []

    @abstractmethod
    def exchanging(self, last: bool) -> AbstractContextManager[Any]:
        """Return the context for forward and backward of one micro batch."""

    def backward(self, loss: torch.Tensor) -> None:
        """Differentiate a micro batch's loss, in `exchanging(last)`. After the last one gradients are all ranks'."""
        loss.backward()  # type: ignore[no-untyped-call]

    def clear_gradients(self) -> None:
        """Forget them, before a step. As the optimizer's zero_grad, in a tenth of its time."""
        for parameter in self._parameters:
            parameter.grad = None

    def gradients_norm(self) -> torch.Tensor:
        """Return the global norm of the gradients, the same on every rank, without waiting for a GPU.

        Every rank has to call it.
        """
        return self._norm(self._gradients())

    def scale_gradients(self, factor: float | torch.Tensor) -> None:
        """Multiply the gradients. `factor`: a number, or an fp32 tensor beside fp32 gradients."""
        if gradients := self._gradients():
            torch_private.foreach("mul_")(gradients, factor)

    def _gradients(self) -> list[torch.Tensor]:
        return [item.grad for item in self._parameters if item.grad is not None]

    def rest(self) -> None:  # noqa: B027 - nothing to do where nothing is gathered
        """Give back what a forward without a backward pass has gathered. Call it after an evaluation."""

    @abstractmethod
    def _norm(self, gradients: list[torch.Tensor]) -> torch.Tensor: ...


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, sharing its memory; any other tensor as it is."""
    with torch.no_grad():
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _pieces(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    return torch.split(tensor.flatten(), _PIECE) if tensor.numel() > _PIECE else (tensor,)


def norms(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return norms whose own norm is that of all the tensors together.

    Long tensors on a CPU are cut, since torch adds up 2**24 squares in fp32 with an error of 6e-4, and 2**15 with 1e-6.
    """
    pieces = tensors
    if tensors[0].device.type == "cpu":
        pieces = [piece for tensor in tensors for piece in _pieces(tensor)]
    return torch.stack(torch_private.foreach("norm")(pieces)).float()
