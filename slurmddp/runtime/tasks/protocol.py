"""What a task brings: model, data, loss. A user's own task is any object with these methods."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn


class Samples(Protocol):
    """Samples by number: len(samples), samples[i] for i from 0. Has to pickle, and give the same on every
    rank.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class Loss:
    """The loss of one micro batch as a sum, so that batches of any size can be added up exactly.

    `total`: scalar tensor, sum of the losses of all targets, with its gradient. `count`: how many targets
    that is (an int, or a scalar tensor). `metrics`: further sums over the same targets or samples, by name,
    each with its own count.
    """

    total: torch.Tensor
    count: torch.Tensor | int
    metrics: Mapping[str, tuple[torch.Tensor, torch.Tensor | int]] = field(default_factory=dict)


def optional(task: object, name: str) -> Callable[..., Any] | None:
    """A method that a task may have or not (see `Task`); None where it has not, or has None there."""
    found: Callable[..., Any] | None = getattr(task, name, None)
    return found


class Task(Protocol):
    """One kind of training.

    `targets_per_sample`: how many targets a sample has, or has about (a scale for the gradients before the
    true count of a step is known; it never changes the result by more than rounding). `unit`: what a target
    is called in messages, in the plural ("tokens", "samples"). `metrics`: the names of the metrics that
    `loss` gives, always all of them, in this order.

    What a task may have besides (`optional`):

    - `augment(sample, generator) -> sample`: called in the data workers on samples to train on, with a torch.Generator
      on the CPU that is seeded from (seed, epoch, sample id). All that is random has to come from it.
    - `lengths() -> integers`: the length of each training sample by id, as an array, an integer tensor or a list; what
      a sample costs, in any unit, exact or nearly. Needed for batch.by_length.
    - `filling(batch) -> (filled, places)`: of a collated batch, how many tokens are real, and on how many the model
      computes, padding included.
    """

    targets_per_sample: int
    unit: str
    metrics: Sequence[str]

    def build_model(self) -> nn.Module:
        """A new model on the CPU. The generators are seeded, so that it is the same on every rank."""
        ...

    def train_samples(self) -> Samples:
        """The samples to train on."""
        ...

    def validation_samples(self) -> Samples:
        """The samples to evaluate on, none of them among the others; may be empty."""
        ...

    def fingerprint(self) -> str:
        """A text that changes when the data does, and not with where it lies. Checked on resume."""
        ...

    def collate(self, samples: list[Any]) -> Any:
        """Samples to a batch: tensors on the CPU, alone or nested in lists, tuples and mappings."""
        ...

    def loss(self, model: Callable[..., Any], batch: Any) -> Loss:
        """Loss of a batch that is on the model's device. Calls `model` exactly once."""
        ...

    def report(self, means: Mapping[str, float]) -> dict[str, float]:
        """Figures for people from means over the validation set: "loss" and each metric by name."""
        ...
