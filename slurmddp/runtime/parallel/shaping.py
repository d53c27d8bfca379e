"""What is done to a model before it is made parallel: compilation, activation checkpointing, channels_last.

All of it replaces the `forward` of a module or puts a hook before it, so that the names of parameters, and with them
checkpoints, stay as they are.
"""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from slurmddp.runtime.errors import UserError
from slurmddp.runtime.job import Train
from slurmddp.runtime.world import World


def shape(bare: nn.Module, train: Train, world: World, *, sharded: bool) -> None:
    """Change `bare` in place as the job asks; every rank has to call it.

    The whole model is compiled as one, or each block by itself where parameters are sharded (gathering them is not
    for the compiler) or activations recomputed. Raises a shared UserError where torch.compile does not work.
    """
    if train.channels_last:
        _channels_last(bare, weights=not sharded)
    by_block = sharded or train.activation_checkpointing
    parts = list(blocks(bare))
    if by_block and not parts and train.activation_checkpointing:
        raise UserError(
            "train.activation_checkpointing: the model has no blocks to recompute. Set it to false, or put the "
            "model's layers in an nn.ModuleList",
            shared=True,
        )
    if train.compile:
        world.together(lambda: check_compiler(world.device))
        for module in parts if by_block and parts else [bare]:
            module.forward = torch.compile(module.forward)
    if train.activation_checkpointing:
        for block in parts:
            block.forward = _recomputed(block.forward)


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that are held in an nn.ModuleList and have a forward, inner ones before those around them."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    seen: set[nn.Module] = set()
    for found in reversed(lists):
        for child in found:
            runs = type(child).forward is not nn.Module.forward
            if runs and child not in seen and any(True for _ in child.parameters()):
                seen.add(child)
                yield child


def check_compiler(device: torch.device) -> None:
    """Compile something small on `device`. Raises UserError if that does not work."""
    try:
        torch.compile(_something)(torch.ones(4, device=device))
    except Exception as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), repr(error)).strip()
        raise UserError(
            f"train.compile: torch.compile does not work here ({reason}); it needs a C++ compiler in the image "
            f"and, on GPUs, Triton: use an image with both, or set train.compile: false"
        ) from error


def _something(x: torch.Tensor) -> torch.Tensor:
    return (x * 2.0 + 1.0).sum()


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` that keeps its inputs alone, and runs again in the backward pass with the same random numbers."""

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run


def _channels_last(model: nn.Module, *, weights: bool) -> None:
    """4-d weights and inputs with the channels last in memory; indices and results are the same.

    FSDP takes contiguous weights only. A convolution goes by its input, then, and reorders its weights itself.
    """
    if weights:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def reorder(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return tuple(map(_reordered, args)), {name: _reordered(value) for name, value in kwargs.items()}

    model.register_forward_pre_hook(reorder, with_kwargs=True)


def _reordered(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.ndim == 4:
        return value.contiguous(memory_format=torch.channels_last)
    return value
