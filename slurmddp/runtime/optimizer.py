"""The optimizer from the job's description."""

from typing import Any

import torch
from torch import nn

from slurmddp.runtime.job import Optimizer


def build(model: nn.Module, wanted: Optimizer) -> torch.optim.Optimizer:
    """AdamW or SGD over the model's trainable parameters.

    Parameters of one dimension or none (biases, norms) are not decayed. AdamW is fused where the device has
    it.
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
    if wanted.name == "sgd":
        return torch.optim.SGD(groups, lr=wanted.lr, momentum=wanted.momentum)
    fused = all(parameter.device.type in ("cuda", "cpu") and parameter.is_floating_point() for parameter in parameters)
    betas = (wanted.betas[0], wanted.betas[1])
    return torch.optim.AdamW(groups, lr=wanted.lr, betas=betas, eps=wanted.eps, fused=fused)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = rate
