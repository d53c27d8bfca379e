"""The optimizer from the job's description."""

from typing import Any

import torch
from torch import nn

from slurmddp.runtime.job import Optimizer


def build(model: nn.Module, wanted: Optimizer) -> torch.optim.Optimizer:
    """AdamW or SGD over the model's trainable parameters.

    Parameters of one dimension or none (biases, norms) are not decayed. Fused where the job wants that and the device
    has it; the values are the same but for rounding. Parameters may be DTensors; so are their moments, then.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {
            "params": [parameter for parameter in parameters if parameter.ndim >= 2],
            "weight_decay": wanted.weight_decay,
        },
        {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    fused = wanted.fused and _can_fuse(parameters)
    if wanted.name == "sgd":
        # torch has no fused SGD for DTensors.
        fused = fused and not any(hasattr(item, "to_local") for item in parameters)
        return torch.optim.SGD(groups, lr=wanted.lr, momentum=wanted.momentum, fused=fused)
    betas = (wanted.betas[0], wanted.betas[1])
    return torch.optim.AdamW(groups, lr=wanted.lr, betas=betas, eps=wanted.eps, fused=fused)


def _can_fuse(parameters: list[nn.Parameter]) -> bool:
    return all(item.device.type in ("cuda", "cpu") and item.is_floating_point() for item in parameters)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = rate
