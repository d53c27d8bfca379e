"""A task of the user's own for tests of faults: its steps take as long as it says, and a rank of it fails on demand.

Its job names it as "faulty:create". `data.pace`: seconds that a micro batch's forward pass takes at least. The rank
whose number the file `raise` in the run folder holds removes the file and raises. `data.dropout` makes the weights
depend on the random states of all ranks, and Adam on every step before: what is resumed wrongly ends with others.
"""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slurmddp.runtime.tasks.protocol import Loss

#: What the rank says that was told to fail.
MESSAGE = "told to fail by the file raise"
SAMPLES, WIDTH = 500, 200
#: Seconds more that a micro batch takes while the file `slow` is in the run folder.
SLOWER = 1.0


class Rows:
    """Random rows."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(WIDTH, generator=torch.Generator().manual_seed(index))


class Faulty:
    """Two layers, 0.3 MB each."""

    targets_per_sample = 1
    unit = "rows"
    metrics = ()

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._pace, self._dropout = float(data["pace"]), float(data["dropout"])
        folder = Path(os.environ["SLURMDDP_RUN"])
        self._trigger, self._slow = folder / "raise", folder / "slow"

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 400), nn.Dropout(self._dropout), nn.Linear(400, WIDTH))

    def train_samples(self) -> Rows:
        return Rows()

    def validation_samples(self) -> list[torch.Tensor]:
        return []

    def fingerprint(self) -> str:
        return "faulty"

    def collate(self, samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(samples)

    def loss(self, model: Callable[..., Any], batch: torch.Tensor) -> Loss:
        time.sleep(self._pace + (SLOWER if self._slow.exists() else 0))
        if self._trigger.exists() and self._trigger.read_text().strip() == os.environ["RANK"]:
            self._trigger.unlink()
            raise RuntimeError(MESSAGE)
        return Loss((model(batch) - batch).square().mean(1).sum(), len(batch))

    def report(self, means: Mapping[str, float]) -> dict[str, float]:
        return {}


def create(data: Mapping[str, Any], model: Mapping[str, Any]) -> Faulty:
    return Faulty(data)
