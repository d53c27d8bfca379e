"""A script that was killed draws the random numbers that it would have drawn undisturbed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from slurmddp.runtime import Checkpointer, GlobalSampler

from .harness import Ranks

EPOCHS, LENGTH, BATCH = 3, 10, 4  # Epochs of 3, 2 and 3 steps.
STEPS = 8


class Augmented(Dataset[torch.Tensor]):
    """Samples with noise of the process that loads them."""

    def __init__(self, noise: float) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index)) + self.noise * torch.rand(4)


class Killed(Exception):
    """It ends before a step."""


def train(
    folder: Path, losses: dict[int, float], *, workers: int = 0, end: int | None = None, skip: bool = False
) -> None:
    """A loop with dropout, noise and a validation that draws; it ends before step `end` + 1. skip: done epochs."""
    torch.manual_seed(7)
    sampler = GlobalSampler(LENGTH, global_batch=BATCH, seed=1)
    loader = DataLoader(Augmented(0.0 if workers else 1.0), batch_sampler=sampler, num_workers=workers)
    validation = DataLoader(Augmented(1.0))
    bare = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    model = nn.parallel.DistributedDataParallel(bare)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    checkpointer = Checkpointer(model, optimizer, folder, sampler=sampler, every_steps=end, asynchronous=False)
    step, batches = checkpointer.follow(loader)
    for epoch in range(sampler.epoch if skip else 0, EPOCHS):
        sampler.set_epoch(epoch)
        for rows in batches:
            if step == end:
                raise Killed
            step += 1
            loss = model(rows).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[step] = loss.item()
        if not skip:
            found = sum(rows.sum().item() for rows in validation)
            losses.setdefault(-epoch, found)  # A resumed loop validates the epochs that are done once more.


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("workers", "skip"), [(0, False), (0, True), pytest.param(1, False, marks=pytest.mark.long)])
def test_losses_with_dropout_are_those_of_the_undisturbed_run(
    ranks: Ranks, tmp_path: Path, workers: int, skip: bool
) -> None:
    for undisturbed, resumed in ranks(2, _undisturbed_and_resumed, tmp_path, workers, skip):
        assert len(undisturbed) == STEPS + (0 if skip else EPOCHS)
        assert {end: losses == undisturbed for end, losses in resumed.items()} == dict.fromkeys(resumed, True)


def _undisturbed_and_resumed(world: Any, folder: Path, workers: int, skip: bool) -> tuple[Any, Any]:
    undisturbed: dict[int, float] = {}
    train(folder / "whole", undisturbed, workers=workers, skip=skip)
    resumed: dict[int, dict[int, float]] = {}
    for end in range(2, 6) if workers == 0 else (2, 3):
        resumed[end] = {}
        with pytest.raises(Killed):
            train(folder / str(end), resumed[end], workers=workers, end=end, skip=skip)
        train(folder / str(end), resumed[end], workers=workers, skip=skip)
    return undisturbed, resumed
