"""The interface of a task: model, data and loss. A user's own task is any object with these methods."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn


class Samples(Protocol):
    """Samples by number: len(samples), and samples[i] for i from 0. They must pickle, and be the same on every rank."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class Loss:
    """The loss of one micro batch as a sum, so that batches of any size add up exactly.

    `total`: scalar tensor with gradient, the sum of the losses of all targets. `count`: number of these targets, an int
    or a scalar tensor. `metrics`: name -> (sum, count) of further values over the same targets or samples.
    """

    total: torch.Tensor
    count: torch.Tensor | int
    metrics: Mapping[str, tuple[torch.Tensor, torch.Tensor | int]] = field(default_factory=dict)


def optional(task: object, name: str) -> Callable[..., Any] | None:
    """Return an optional method of a task (see `Task`); None if the task does not have it."""
    found: Callable[..., Any] | None = getattr(task, name, None)
    return found


class Task(Protocol):
    """One kind of training.

    `targets_per_sample`: targets per sample, exact or approximate (it scales gradients before the true count of a step
    is known, and changes the result by rounding only). `unit`: name of a target in messages, in the plural ("tokens",
    "samples"). `metrics`: names of the metrics that `loss` returns, always all of them, in this order.

    Optional methods (`optional`):

    - `augment(sample, generator) -> sample`: called in the data workers on training samples. `generator` is a
      torch.Generator on the CPU, seeded from (seed, epoch, sample id); use no other source of randomness.
    - `lengths() -> integers`: the length of each training sample by id, as an array, an integer tensor [samples] or a
      list. Any unit, exact or approximate: it stands for the cost of a sample. Needed for batch.by_length.
    - `filling(batch) -> (filled, computed)`: for a collated batch, the number of real tokens, and the number of tokens
      that the model computes, padding included.
    """

    targets_per_sample: int
    unit: str
    metrics: Sequence[str]

    def build_model(self) -> nn.Module:
        """Return a new model on the CPU. Random generators are seeded, so it is the same on every rank."""

    def train_samples(self) -> Samples:
        """Return the training samples."""

    def validation_samples(self) -> Samples:
        """Return the validation samples, none of them a training sample; may be empty."""

    def fingerprint(self) -> str:
        """Return a text that changes if the data changes, but not if its path does. Checked when a run resumes."""

    def collate(self, samples: list[Any]) -> Any:
        """Return a batch of these samples: CPU tensors, alone or nested in lists, tuples and mappings."""

    def loss(self, model: Callable[..., Any], batch: Any) -> Loss:
        """Return the loss of a batch on the model's device. Must call `model` exactly once."""

    def report(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return figures to print, from the means over the validation set: "loss" and each metric by name."""
