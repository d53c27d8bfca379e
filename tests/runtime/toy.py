"""A task small enough to count by hand: samples with different numbers of targets, a model of a few layers.

Also the example of a user's own task: the jobs of these tests name it as "runtime.toy:create".
"""

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slurmddp.runtime.tasks.protocol import Loss, Samples


class Rows:
    """Sample i: 1 to 4 rows of 4 features, made from its number."""

    def __init__(self, start: int, count: int, data: Mapping[str, Any] | None = None) -> None:
        self._start, self._count, self._data = start, count, data or {}

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        if not 0 <= index < self._count:
            raise IndexError(index)
        if index == self._data.get("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        if index == self._data.get("touch"):
            Path(self._data["path"]).touch()
        generator = torch.Generator().manual_seed(self._start + index)
        rows = torch.randn(1 + (self._start + index) % 4, 4, generator=generator)
        return rows * float("nan") if index == self._data.get("poison") else rows


class Toy:
    """`data`: train, validation (sample numbers); poison, poison_gradient, kill, touch: the sample that makes loss or
    gradient nan, kills the process that reads it, or makes it touch the file `path`. `model`: width, dropout.
    """

    targets_per_sample = 2
    unit = "rows"
    metrics: Sequence[str] = ("positive",)

    def __init__(self, data: Mapping[str, Any], model: Mapping[str, Any]) -> None:
        self._data, self._model = data, model

    def build_model(self) -> nn.Module:
        width = self._model.get("width", 8)
        return nn.Sequential(
            nn.Linear(4, width), nn.Tanh(), nn.Dropout(self._model.get("dropout", 0.0)),
            nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1),
        )  # fmt: skip

    def train_samples(self) -> Samples:
        return Rows(0, self._data.get("train", 23), self._data)

    def validation_samples(self) -> Samples:
        return Rows(1000, self._data.get("validation", 7))

    def fingerprint(self) -> str:
        return f"toy {self._data.get('salt', 0)}"

    def collate(self, samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"rows": torch.cat(samples)}

    def loss(self, model: Callable[..., Any], batch: dict[str, torch.Tensor]) -> Loss:
        rows = batch["rows"]
        output = model(rows)[:, 0]
        total = (output - rows.sum(1)).square().sum()
        if self._poisons(rows):
            total = total + (0.0 * output).abs().sqrt().sum()  # 0, with the gradient 0 * inf.
        return Loss(total, len(rows), {"positive": ((output > 0).sum(), len(rows))})

    def _poisons(self, rows: torch.Tensor) -> bool:
        poison = self._data.get("poison_gradient")
        if poison is None:
            return False
        first = Rows(0, self._data.get("train", 23))[poison][0]
        return bool((rows == first).all(1).any()) and torch.is_grad_enabled()

    def report(self, means: Mapping[str, float]) -> dict[str, float]:
        return {"positive": means["positive"]}


def create(data: Mapping[str, Any], model: Mapping[str, Any]) -> Toy:
    return Toy(data, model)


def incomplete(data: Mapping[str, Any], model: Mapping[str, Any]) -> object:
    return object()
