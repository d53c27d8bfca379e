"""The options of an optimizer's groups (learning rate, betas, ...) as JSON values, and back."""

from collections.abc import Mapping
from typing import Any

import torch

from slurmddp.runtime.errors import UserError

_PLAIN = (bool, int, float, str, type(None))


def options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return all of each group but its parameters, without values that JSON cannot hold."""
    return [
        {name: _plain(value) for name, value in group.items() if name != "params" and _fits(value)}
        for group in optimizer.param_groups
    ]


def check(optimizer: torch.optim.Optimizer, data: Mapping[str, Any]) -> None:
    """Raises UserError if `data`, of a checkpoint, is of another optimizer."""
    found = data.get("groups")
    if found is None:
        return
    name = type(optimizer).__name__
    if data.get("optimizer") != name:
        raise UserError(f"it was saved with the optimizer {data.get('optimizer')}, but this run uses {name}")
    if len(found) != len(optimizer.param_groups):
        raise UserError(f"the optimizer had {len(found)} parameter groups and now has {len(optimizer.param_groups)}")


def restore(optimizer: torch.optim.Optimizer, data: Mapping[str, Any]) -> None:
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
