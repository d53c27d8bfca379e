"""Marks where FSDP's own hooks begin and end: there, ranks wait until parameters are gathered and gradients reduced.

FSDP2 (torch.distributed.fsdp.fully_shard) gathers a module's parameters in a hook before its forward, and again before
its backward, and reduces its gradients after that. Here, each of these stands between two hooks more. On a GPU, the
marks are on the stream that computes, which waits there for the streams that communicate: what travels while the GPU
computes is not counted. Packing and unpacking, on that stream too, are.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from slurmddp.runtime import torch_private
from slurmddp.runtime.measure.timing import BACKWARD, FORWARD, NETWORK

#: Called with the part of a step that ends now, as StepTimer.mark.
Mark = Callable[[str], None]
#: The autograd node that FSDP puts before a module; its backward reduces the module's gradients.
_REDUCING = "RegisterPostBackwardFunctionBackward"


def mark_waits(module: nn.Module, mark: Mark, *, root: bool) -> None:
    """Call it after `fully_shard` of the module: all that its hooks do is NETWORK from now on.

    root: the model itself. FSDP waits for the last gradients when its backward pass is over: the caller has to mark
    that end as NETWORK.
    """

    def begin_forward(*_: Any) -> None:
        mark(FORWARD)

    def begin_backward(*_: Any) -> None:
        mark(BACKWARD)

    def end(*_: Any) -> None:
        mark(NETWORK)

    def end_gathering(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mark(NETWORK)
        node = next((item.grad_fn for item in _differentiable((*args, *kwargs.values()))), None)
        if node is not None and node.name() == _REDUCING:
            node.register_prehook(begin_backward)
            node.register_hook(end)

    def begin_root_backward(_: torch.Tensor) -> None:
        # FSDP queues its own at the same place, a moment later; they run in this order.
        torch_private.after_backward(begin_backward)
        mark(BACKWARD)

    def at_backward(hook: Callable[[torch.Tensor], None]) -> Callable[[nn.Module, Any, Any], None]:
        def register(_: nn.Module, _args: Any, output: Any) -> None:
            for item in _differentiable(output):
                item.register_hook(hook)  # type: ignore[no-untyped-call]

        return register

    module.register_forward_pre_hook(begin_forward, prepend=True)
    module.register_forward_pre_hook(end_gathering, with_kwargs=True)
    module.register_forward_hook(at_backward(begin_root_backward if root else begin_backward), prepend=True)
    module.register_forward_hook(at_backward(end))


def _differentiable(value: Any) -> list[torch.Tensor]:
    """The tensors in it, at its first level, that need a gradient."""
    items = value if isinstance(value, tuple | list) else (value,)
    return [item for item in items if isinstance(item, torch.Tensor) and item.requires_grad]
