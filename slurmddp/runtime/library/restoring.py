"""What a checkpoint is loaded from, and into what: the model, and the options of the optimizer's groups."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import nn

from slurmddp.runtime import randomness, torch_private
from slurmddp.runtime.checkpoint import reader, state, tensorfile
from slurmddp.runtime.errors import UserError
from slurmddp.runtime.library import shared
from slurmddp.runtime.library.sampler import GlobalSampler
from slurmddp.runtime.world import World
from slurmddp.shared import mesh
from slurmddp.shared.checkpoint import layout


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

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position."""


def adopt(
    now: shared.Shared, world: World, trained: state.Trained, sampler: Positioned | None, choice: reader.Choice
) -> None:
    """Load a checkpoint in place, and say so; every rank has to call it. Raises UserError if it does not fit."""

    def check() -> None:
        check_groups(trained.optimizer, choice.data)
        was, now_ = choice.data.get("scheduler"), name_of(trained.scheduler)
        if trained.scheduler is not None and was != now_:
            raise UserError(f"it was saved with {was or 'no'} scheduler, but this run uses {now_}")
        if sampler is not None and choice.data.get("sampler") is not None:
            sampler.load_state_dict(choice.data["sampler"])

    reader.load(choice, trained, world, check=check)
    restore_groups(trained.optimizer, choice.data)
    if trained.scheduler is not None:
        path = choice.path / layout.SCHEDULER
        trained.scheduler.load_state_dict(world.together(lambda: tensorfile.load(path)))
    restored = reader.restore_randomness(choice, world, 0)
    if restored and isinstance(sampler, GlobalSampler):
        sampler.restore_with(partial(randomness.restore, randomness.states(world.device), world.device))
    reader.resumed(now, world, choice, restored=restored)


def folder(given: str | Path | None) -> Path:
    """Return the folder of checkpoints: the given one, else the run's, else ./checkpoints for a script alone."""
    run = shared.run_folder()
    return Path(given or (run.checkpoints if run else "checkpoints")).absolute()


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


def name_of(scheduler: state.Stateful | None) -> str | None:
    """Return the name of its class, for data.json."""
    return None if scheduler is None else type(scheduler).__name__


_PLAIN = (bool, int, float, str, type(None))


def groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return all of each group but its parameters, without values that JSON cannot hold."""
    return [
        {name: _plain(value) for name, value in group.items() if name != "params" and _fits(value)}
        for group in optimizer.param_groups
    ]


def check_groups(optimizer: torch.optim.Optimizer, data: Mapping[str, Any]) -> None:
    """Raises UserError if `data`, of a checkpoint, is of another optimizer."""
    found = data.get("groups")
    if found is None:
        return
    name = type(optimizer).__name__
    if data.get("optimizer") != name:
        raise UserError(f"it was saved with the optimizer {data.get('optimizer')}, but this run uses {name}")
    if len(found) != len(optimizer.param_groups):
        raise UserError(f"the optimizer had {len(found)} parameter groups and now has {len(optimizer.param_groups)}")


def restore_groups(optimizer: torch.optim.Optimizer, data: Mapping[str, Any]) -> None:
    """Put the options back, as an optimizer's load_state_dict does. Those that are new keep their present values."""
    for group, saved in zip(optimizer.param_groups, data.get("groups") or [], strict=False):
        for name, value in saved.items():
            before = group.get(name)
            if isinstance(before, torch.Tensor):
                before.fill_(value)  # A learning rate that a graph reads.
            else:
                group[name] = tuple(value) if isinstance(before, tuple) else value


def _fits(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    if isinstance(value, list | tuple):
        return all(isinstance(item, _PLAIN) for item in value)
    return isinstance(value, _PLAIN)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value
