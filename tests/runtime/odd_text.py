"""The task lm with a loader that takes 20 ms per sample; and on a device whose memory ends at 5 samples."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from slurmddp.runtime.tasks import lm
from slurmddp.runtime.tasks.options import checked
from slurmddp.runtime.tasks.protocol import Loss, Samples


class SlowWindows(lm.Windows):
    """Windows that are slow to read."""

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.02)
        return super().__getitem__(index)


class SlowText(lm.LanguageModel):
    """See the module."""

    def _samples(self, training: bool) -> Samples:
        return SlowWindows(self._stream, self._context, self._validation, training=training)


class _Full(torch.autograd.Function):
    """Runs out of memory in the backward pass, as a GPU does, with DDP in the middle of its buckets."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, samples: int) -> torch.Tensor:
        ctx.samples = samples
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.samples > 5:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return gradient, None


class GreedyText(lm.LanguageModel):
    """See the module."""

    def loss(self, model: Callable[..., Any], batch: Any) -> Loss:
        return super().loss(lambda tokens: _Full.apply(model(tokens), len(tokens)), batch)


def create(data: Mapping[str, Any], model: Mapping[str, Any]) -> SlowText:
    return SlowText(checked("lm", "data", data), checked("lm", "model", model, data))


def greedy(data: Mapping[str, Any], model: Mapping[str, Any]) -> GreedyText:
    return GreedyText(checked("lm", "data", data), checked("lm", "model", model, data))
