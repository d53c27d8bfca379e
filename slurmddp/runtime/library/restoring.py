"""What a checkpoint is loaded from, and into what."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from torch import nn

from slurmddp.runtime import torch_private
from slurmddp.runtime.checkpoint import messages, reader, state
from slurmddp.runtime.errors import UserError
from slurmddp.runtime.library import param_groups, shared
from slurmddp.runtime.world import World
from slurmddp.shared import mesh


@dataclass(frozen=True)
class State:
    """What `Checkpointer.load` returns.

    `step`: steps done. `extra`: what was given to `save`. `path`: the checkpoint. `ranks`: how many had saved it.
    """

    step: int
    extra: dict[str, Any]
    path: Path
    ranks: int


class Positioned(Protocol):
    """An object with a position in the data, such as GlobalSampler."""

    def state_dict(self, step: int) -> Mapping[str, Any]:
        """Return the position after `step` as JSON values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position."""
        ...


def adopt(
    now: shared.Shared, world: World, trained: state.Trained, sampler: Positioned | None, choice: reader.Choice
) -> None:
    """Load a checkpoint in place, and say so; every rank has to call it. Raises UserError if it does not fit."""

    def check() -> None:
        param_groups.check(trained.optimizer, choice.data)
        if sampler is not None and choice.data.get("sampler") is not None:
            sampler.load_state_dict(choice.data["sampler"])

    reader.load(choice, trained, world, check=check)
    param_groups.restore(trained.optimizer, choice.data)
    restored = reader.restore_randomness(choice, world, 0)
    messages.resumed(now, world, choice, restored=restored)


def folder(given: str | Path | None) -> Path:
    """Return the folder of checkpoints: the given one, or the run's. Raises UserError if there is neither."""
    if given is not None:
        return Path(given)
    run = shared.run_folder()
    if run is None:
        raise UserError(
            "Checkpointer: SLURMDDP_RUN is not set, so there is no run folder: pass one, Checkpointer(model, "
            "optimizer, folder=...)"
        )
    return run.checkpoints


def bare(model: nn.Module) -> nn.Module:
    """Return the script's own module, without DDP and torch.compile around it."""
    inner: Any = model
    while True:
        if isinstance(inner, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = inner.module
        elif (compiled := torch_private.compiled_module(inner)) is not None:
            inner = compiled
        else:
            return cast(nn.Module, inner)


def mesh_of(model: nn.Module, size: int) -> dict[str, int]:
    """Return how the parameters lie over the ranks, for the manifest."""
    shapes = [tuple(item.device_mesh.shape) for item in model.parameters() if hasattr(item, "device_mesh")]
    return mesh.sizes(size, None, shapes[0][-1] if shapes and size % shapes[0][-1] == 0 else 1)
