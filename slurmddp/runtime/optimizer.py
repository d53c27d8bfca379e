"""The optimizer from the job's description, and its learning rate: a function of the step, so nothing to save."""

import math
from typing import Any

import torch
from torch import nn

from slurmddp.runtime.errors import UserError
from slurmddp.runtime.job import Optimizer, Schedule


def build(model: nn.Module, wanted: Optimizer) -> torch.optim.Optimizer:
    """AdamW or SGD over the model's trainable parameters.

    Parameters of one dimension or none (biases, norms) are not decayed. Fused where the job wants that and the device
    has it; the values are the same but for rounding. Parameters may be DTensors; so are their moments, then.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [parameter for parameter in parameters if parameter.ndim >= 2], "weight_decay": wanted.weight_decay},
        {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    can_fuse = all(item.device.type in ("cuda", "cpu") and item.is_floating_point() for item in parameters)
    fused = wanted.fused and can_fuse
    if wanted.name == "sgd":
        # torch has no fused SGD for DTensors.
        fused = fused and not any(hasattr(item, "to_local") for item in parameters)
        return torch.optim.SGD(groups, lr=wanted.lr, momentum=wanted.momentum, fused=fused)
    betas = (wanted.betas[0], wanted.betas[1])
    return torch.optim.AdamW(groups, lr=wanted.lr, betas=betas, eps=wanted.eps, fused=fused)


def ratio(schedule: Schedule, step: int, steps: int) -> float:
    """Return the factor on the base learning rate for the update number `step` (the first is 0) of `steps`.

    Rises linearly over `warmup` updates (the first already has 1/warmup), then falls from 1 to `min_ratio`
    along a cosine or a line over the schedule's length, and stays there; `constant` stays at 1.
    """
    length = schedule.steps if schedule.steps is not None else steps
    if step < schedule.warmup:
        return (step + 1) / schedule.warmup
    if schedule.kind == "constant":
        return 1.0
    progress = min(1.0, (step - schedule.warmup) / max(1, length - schedule.warmup))
    shape = 0.5 * (1.0 + math.cos(math.pi * progress)) if schedule.kind == "cosine" else 1.0 - progress
    return schedule.min_ratio + (1.0 - schedule.min_ratio) * shape


def scaled(lr: float, rule: str, lr_batch: int | None, global_batch: int) -> float:
    """Return the learning rate for `global_batch` samples, where `lr` was tuned for `lr_batch`.

    `rule`: "linear" (as the batch grows, so does the rate: SGD), "sqrt" (as its root: Adam and its kin), or "none".
    Raises UserError for a rule without lr_batch.
    """
    if rule == "none":
        return lr
    if lr_batch is None:
        raise UserError(
            f"train.optimizer.lr_batch is missing: lr_rule {rule} needs the global batch that lr was tuned for"
        )
    factor = global_batch / lr_batch
    return lr * (factor if rule == "linear" else math.sqrt(factor))
