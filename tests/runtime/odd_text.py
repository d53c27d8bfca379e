"""The task lm with a loader that takes 20 ms per sample; and on a device whose memory ends at 5 samples."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

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


class GreedyText(lm.LanguageModel):
    """Runs out of memory in the second backward pass of a step, with DDP in the middle of its buckets."""

    _large = 0

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.get_parameter("positions.weight").register_hook(self._fill)
        return model

    def _fill(self, gradient: torch.Tensor) -> None:
        if self._large == 2:
            self._large = 0
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    def loss(self, model: Callable[..., Any], batch: Any) -> Loss:
        self._large = self._large + 1 if len(batch) > 5 else 0
        return super().loss(model, batch)


def create(data: Mapping[str, Any], model: Mapping[str, Any]) -> SlowText:
    return SlowText(checked("lm", "data", data), checked("lm", "model", model, data))


def greedy(data: Mapping[str, Any], model: Mapping[str, Any]) -> GreedyText:
    return GreedyText(checked("lm", "data", data), checked("lm", "model", model, data))
