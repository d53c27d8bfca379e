"""The task lm with a loader that takes 20 ms per sample."""

import time
from collections.abc import Mapping
from typing import Any

import torch

from slurmddp.runtime.tasks import lm
from slurmddp.runtime.tasks.options import checked
from slurmddp.runtime.tasks.protocol import Samples


class SlowWindows(lm.Windows):
    """Windows that are slow to read."""

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.02)
        return super().__getitem__(index)


class SlowText(lm.LanguageModel):
    """See the module."""

    def _samples(self, training: bool) -> Samples:
        return SlowWindows(self._stream, self._context, self._validation, training=training)


def create(data: Mapping[str, Any], model: Mapping[str, Any]) -> SlowText:
    return SlowText(checked("lm", "data", data), checked("lm", "model", model, data))
