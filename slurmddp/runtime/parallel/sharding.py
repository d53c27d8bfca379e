"""The model in shards: FSDP2, and HSDP where there are replicas of them; and in tensor groups beneath these."""

import contextlib
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from slurmddp.runtime import torch_private
from slurmddp.runtime.errors import UserError
from slurmddp.runtime.measure.timing import NETWORK
from slurmddp.runtime.parallel import shaping
from slurmddp.runtime.parallel.model import Parallel, data_rank, local, norms
from slurmddp.runtime.parallel.replicas import fingerprint
from slurmddp.runtime.parallel.tensor import split
from slurmddp.runtime.parallel.waits import Mark, mark_waits
from slurmddp.runtime.world import World
from slurmddp.shared import mesh


class Sharded(Parallel):
    """Parameters, gradients and optimizer states in shards (FSDP2); where replicate is above 1, replicas of them.

    Each block (see shaping.blocks) is gathered when it runs, and the rest with the model itself. Gradients are reduced
    to their shards after every micro batch, since whole ones would take the memory that sharding saves; between
    replicas they are exchanged after the last one alone.
    """

    lockstep = True

    def __init__(
        self, bare: nn.Module, world: World, sizes: Mapping[str, int], timeout: float, mark: Mark | None = None
    ) -> None:
        """`bare` may be on the CPU still: it moves to the device block by block. `timeout`: of collectives, seconds.

        `mark`: of a timer that is told of the waits for other ranks. Raises UserError where torch is too old, or a
        parameter is a scalar, which cannot be sharded.
        """
        fully_shard = _fully_shard(world.device)
        _check_shapes(bare)
        _give_all_the_same(bare, world)
        self.mesh = dict(sizes)
        self.data = data_rank(world, sizes)
        grid = device_mesh(world, sizes, timeout)
        self._grid = grid
        self._group = grid.get_group(mesh.SHARD) if grid.ndim > 1 else grid.get_group()
        self._tensor_group = grid.get_group(mesh.TENSOR) if mesh.TENSOR in sizes else None
        self._mark = mark
        if self._tensor_group is not None:
            split(bare, grid[mesh.TENSOR])
            grid = grid[mesh.REPLICATE, mesh.SHARD] if sizes[mesh.REPLICATE] > 1 else grid[mesh.SHARD]
        for module in (*_own_blocks(bare), bare):
            fully_shard(module, mesh=grid)
            if mark is not None:
                mark_waits(module, mark, root=module is bare)
        self.module = self.model = bare
        self._parameters = list(bare.parameters())
        self._parts: list[Any] = [part for part in bare.modules() if hasattr(part, "set_requires_gradient_sync")]
        self.divides_by = self._only_sum(self.data.size)

    def exchanging(self, last: bool) -> AbstractContextManager[Any]:
        """Replicas exchange gradients in the last micro batch."""
        self._parts[0].set_requires_all_reduce(last)  # The root's; it tells all others.
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """The last gradients are reduced when the pass itself is over."""
        super().backward(loss)
        if self._mark is not None:
            self._mark(NETWORK)

    def process_groups(self) -> list[dist.ProcessGroup]:
        """One dimension is the world's own group."""
        return list(self._grid.get_all_groups()) if self._grid.ndim > 1 else []

    def rest(self) -> None:
        """Free gathered parameters."""
        for part in self._parts:
            part.reshard()

    def _only_sum(self, ranks: int) -> int:
        """Turn the division of gradients off where torch can: what they are divided by."""
        names = ("set_gradient_divide_factor", "set_force_sum_reduction_for_comms")
        if not all(hasattr(part, name) for part in self._parts for name in names):
            return ranks
        for part in self._parts:
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
        return 1

    def _gradients(self) -> list[torch.Tensor]:
        return [local(gradient) for gradient in super()._gradients()]

    def _norm(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        squares = self._squares(gradients if self._tensor_group is None else self._held(True))
        if self._tensor_group is not None:
            dist.all_reduce(squares, group=self._tensor_group)
            squares += self._squares(self._held(False))
        dist.all_reduce(squares, group=self._group)
        return squares.sqrt()

    def _squares(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        squares = torch.zeros((), dtype=torch.float64, device=next(self.module.parameters()).device)
        return squares + norms(gradients).double().square().sum() if gradients else squares

    def _held(self, in_parts: bool) -> list[torch.Tensor]:
        """This rank's gradients of the parameters that the ranks of a tensor group split, or that each of them has."""
        shards: list[Any] = [item for item in self._parameters if item.grad is not None]
        return [local(item.grad) for item in shards if item.placements[-1].is_shard() == in_parts]


def _fully_shard(device: torch.device) -> Any:
    try:
        from torch.distributed.fsdp import fully_shard  # torch 2.6
    except ImportError as error:
        if device.type == "cuda":  # Before that it stood elsewhere, and made CUDA streams even for a CPU.
            with contextlib.suppress(ImportError):
                return torch_private.earlier_fully_shard()
        raise UserError(
            f"parallel.shard or tensor above 1 needs FSDP2 (torch 2.6 or newer), but torch is {torch.__version__}: use "
            f"a newer image, or set both to 1",
            shared=True,
        ) from error
    return fully_shard


def _check_shapes(bare: nn.Module) -> None:
    scalars = [name for name, item in bare.named_parameters() if item.ndim == 0]
    if scalars:
        raise UserError(
            f"parallel.shard above 1: scalar parameters cannot be sharded: {', '.join(scalars[:5])}. Give them "
            f"the shape [1]",
            shared=True,
        )


def device_mesh(world: World, sizes: Mapping[str, int], timeout: float) -> DeviceMesh:
    """One dimension where all ranks share one model, over the world's own group; else replicate and shard.

    With tensor, all three of any size: replicas of one shard are exchanged by FSDP, too.
    """
    used = {name: size for name, size in sizes.items() if size > 1 or mesh.TENSOR in sizes}
    grid = init_device_mesh(world.device.type, tuple(used.values()), mesh_dim_names=tuple(used))
    if grid.ndim > 1:  # New groups have torch's own limit, not the job's.
        for group in grid.get_all_groups():
            torch_private.set_timeout(group, timeout)
    return grid


def _own_blocks(bare: nn.Module) -> list[nn.Module]:
    """The blocks that share no parameter with anything outside of them: shared ones belong to the root."""
    users: dict[nn.Parameter, int] = {}
    for module in bare.modules():
        for item in module.parameters(recurse=False):
            users[item] = users.get(item, 0) + 1

    def alone(block: nn.Module) -> bool:
        inside: dict[nn.Parameter, int] = {}
        for module in block.modules():
            for item in module.parameters(recurse=False):
                inside[item] = inside.get(item, 0) + 1
        return all(users[item] == count for item, count in inside.items())

    return [block for block in shaping.blocks(bare) if alone(block)]


def _give_all_the_same(bare: nn.Module, world: World) -> None:
    """Rank 0's weights and buffers for every rank, where they are not equal already: another processor may draw other
    numbers from the same seed, and each rank keeps only a shard of its own copy."""
    tensors = [tensor.detach() for tensor in (*bare.parameters(), *bare.buffers())]
    if len(set(world.gather(fingerprint(tensors)))) == 1:
        return
    for tensor in tensors:
        content = tensor.cpu().contiguous()
        dist.broadcast(content, src=0, group=world.coordination)
        tensor.copy_(content)
