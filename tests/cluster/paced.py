"""A task of the user's own whose steps are as long as it says, however busy the machine is: for tests of stragglers.

Its job names it as "paced:create". `data.pace`: seconds that a step's forward pass takes at least. While the file
`slow` in the run folder holds the name of a node, reading a sample takes `data.delay` seconds more there.
"""

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slurmddp.runtime.tasks.protocol import Loss


class Rows:
    """Random rows; on the node that the file names, slow ones."""

    def __init__(self, delay: float) -> None:
        self._delay = delay
        self._slow = Path(os.environ.get("SLURMDDP_RUN", "/none")) / "slow"  # not set in a run by hand

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._slow.exists() and self._slow.read_text() == os.environ["SLURMDDP_NODE"]:
            time.sleep(self._delay)
        return torch.rand(700, generator=torch.Generator().manual_seed(index))


class Paced:
    """One layer of 2 MB: enough for the network to matter."""

    targets_per_sample = 1
    unit = "rows"
    metrics = ()

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._data = data

    def build_model(self) -> nn.Module:
        return nn.Linear(700, 700)

    def train_samples(self) -> Rows:
        return Rows(self._data["delay"])

    def validation_samples(self) -> list[torch.Tensor]:
        return []

    def fingerprint(self) -> str:
        return "paced"

    def collate(self, samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(samples)

    def loss(self, model: Callable[..., Any], batch: torch.Tensor) -> Loss:
        time.sleep(self._data["pace"])
        return Loss((model(batch) - batch).square().mean(1).sum(), len(batch))

    def report(self, means: Mapping[str, float]) -> dict[str, float]:
        return {}


def create(data: Mapping[str, Any], model: Mapping[str, Any]) -> Paced:
    return Paced(data)
