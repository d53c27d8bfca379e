"""Micro batches of exactly the sample ids that are this rank's, in order, made by worker processes."""

import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from slurmddp.runtime import batch, randomness
from slurmddp.runtime.order import SampleOrder
from slurmddp.runtime.tasks.protocol import Samples, Task

_IDS_AT_ONCE = 4096
_IGNORED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

T = TypeVar("T")


@dataclass(frozen=True)
class Micro:
    """One micro batch, collated and still on the host: the ids it was really made of, and the data."""

    ids: list[int]
    data: Any

    def pin_memory(self) -> "Micro":
        """Called by torch's loader: the same in page-locked memory, from which a copy to a GPU need not
        wait.
        """
        return Micro(self.ids, _each_tensor(self.data, torch.Tensor.pin_memory))


class _Numbered(Dataset[tuple[int, Any]]):
    """A task's samples with their ids, so that a trace tells what was read and not what was planned."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return index, self._samples[index]


class _Collate:
    """Collates numbered samples. A class, since it has to pickle where workers are not forked."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def __call__(self, items: list[tuple[int, Any]]) -> Micro:
        return Micro([index for index, _ in items], self._task.collate([sample for _, sample in items]))


class _Batches:
    """The lists of ids to load, one a micro batch, in order. A batch sampler that goes through once."""

    def __init__(self, lists: Iterator[list[int]]) -> None:
        self._lists = lists

    def __iter__(self) -> Iterator[list[int]]:
        return self._lists


def ignore_signals(worker: int) -> None:
    """For data workers: a signal for the whole job must not kill them while the ranks still save.

    They end when their rank does: torch's workers watch their parent.
    """
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)


def training_lists(
    order: SampleOrder, *, start: int, steps: int, total: int, micro: int, world: int, rank: int
) -> Iterator[list[int]]:
    """Ids of this rank's micro batches for `steps` global batches of `total`, from global position `start`
    on.

    Empty micro batches are left out, but for the last of a step: all ranks have to take part in the exchange
    of gradients there, so a rank without samples gets the global batch's first one, to be used with weight
    0.
    """
    parts = batch.micro_batches(total, micro, world, rank)
    parts = tuple(part or range(1) for number, part in enumerate(parts) if part or number == len(parts) - 1)
    pattern = torch.tensor([place for part in parts for place in part])
    # Many steps' ids in one go, which is what the order is quick at; but not many epochs of a small dataset.
    ahead = max(1, min(_IDS_AT_ONCE // len(pattern), 4 * order.length // total))
    for first in range(0, steps, ahead):
        bases = start + total * torch.arange(first, min(first + ahead, steps))
        ids = iter(order.ids((bases[:, None] + pattern).flatten()))
        for _ in bases:
            for part in parts:
                yield list(islice(ids, len(part)))


def evaluation_lists(count: int, *, micro: int, world: int, rank: int) -> Iterator[list[int]]:
    """Ids 0..count-1 of the held-out samples that are this rank's, at most `micro` at a time."""
    mine = batch.share(count, world, rank)
    for start in range(mine.start, mine.stop, micro):
        yield list(range(start, min(start + micro, mine.stop)))


def load(
    task: Task, samples: Samples, lists: Iterator[list[int]], *, rank: int, workers: int, pin_memory: bool
) -> Iterator[Micro]:
    """Iterate over micro batches. Errors of the task's dataset pass through, with the worker's traceback."""
    generator = torch.Generator()
    # The loader draws its workers' seeds when iteration starts. From a generator of its own, it leaves the
    # model's random stream alone, which has to be the same with and without a resume.
    generator.manual_seed(randomness.derive("loader", rank))
    loader: DataLoader[Any] = DataLoader(
        _Numbered(samples),
        batch_sampler=_Batches(lists),
        num_workers=workers,
        collate_fn=_Collate(task),
        worker_init_fn=ignore_signals,
        generator=generator,
        pin_memory=pin_memory,
    )
    # Workers are forked with these signals held back, until they ignore them: no moment is left to die in.
    # The rank itself gets what came meanwhile right after.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
    try:
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def to_device(data: T, device: torch.device) -> T:
    """Tensors in (nested) lists, tuples and mappings moved to the device; anything else as it is."""
    if device.type == "cpu":
        return data
    moved: T = _each_tensor(data, lambda tensor: tensor.to(device, non_blocking=True))
    return moved


def _each_tensor(data: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(data, torch.Tensor):
        return change(data)
    if isinstance(data, Mapping):
        return {key: _each_tensor(item, change) for key, item in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(_each_tensor(item, change) for item in data))
    if isinstance(data, list | tuple):
        return type(data)(_each_tensor(item, change) for item in data)
    return data
