"""Micro batches of exactly the sample ids that are this rank's, in order, made by worker processes."""

import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from slurmddp.runtime import randomness
from slurmddp.runtime.data.order import ByLength, SampleOrder
from slurmddp.runtime.errors import UserError
from slurmddp.runtime.tasks.protocol import Samples, Task, optional
from slurmddp.shared import batch

_IDS_AT_ONCE = 4096
_IGNORED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

T = TypeVar("T")


@dataclass(frozen=True)
class Wanted:
    """One micro batch to load: ids, and their epochs and the seed where they may be augmented.

    `real`: no stand-in, whose gradient counts nothing. `last`: the last one of its step on this rank.
    """

    ids: list[int]
    epochs: list[int] | None = None
    seed: int = 0
    real: bool = True
    last: bool = False


@dataclass(frozen=True)
class Micro:
    """One micro batch, collated and still on the host: the ids it was really made of, and the data.

    `real`, `last`: as wanted. `computed`: tokens (or whatever the samples vary in) that the model computes on, padding
    included; `filled`: those that are none. Both 0 where the task does not say, and for a stand-in.
    """

    ids: list[int]
    data: Any
    real: bool = True
    last: bool = False
    computed: int = 0
    filled: int = 0

    def pin_memory(self) -> "Micro":
        """Called by torch's loader: the same in page-locked memory, from which a copy to a GPU need not wait."""
        return replace(self, data=_each_tensor(self.data, torch.Tensor.pin_memory))


@dataclass(frozen=True)
class _Refused:
    """A UserError of a worker: raised by the loader itself, it would arrive wrapped in a traceback."""

    message: str


class _Maker(Dataset[Any]):
    """Makes micro batches, in a data worker. A class, since it has to pickle where workers are not forked."""

    def __init__(self, task: Task, samples: Samples) -> None:
        self._task = task
        self._samples = samples

    def __getitem__(self, wanted: Wanted) -> Micro | _Refused:
        try:
            return self._make(wanted)
        except UserError as error:
            return _Refused(str(error))

    def _make(self, wanted: Wanted) -> Micro:
        samples = [self._samples[index] for index in wanted.ids]
        augment = optional(self._task, "augment")
        if augment is not None and wanted.epochs is not None:
            generator = torch.Generator()
            for slot, (index, epoch) in enumerate(zip(wanted.ids, wanted.epochs, strict=True)):
                generator.manual_seed(randomness.derive("augment", wanted.seed, epoch, index))
                samples[slot] = augment(samples[slot], generator)
        data = self._task.collate(samples)
        filling = optional(self._task, "filling")
        filled, computed = filling(data) if filling is not None and wanted.real else (0, 0)
        return Micro(list(wanted.ids), data, wanted.real, wanted.last, computed, filled)


def _checked(loaded: Iterator[Micro | _Refused]) -> Iterator[Micro]:
    """Yield what the loader gives. Raises what the dataset raised, with a traceback; a UserError as it was."""
    for made in loaded:
        if isinstance(made, _Refused):
            raise UserError(made.message)
        yield made


def ignore_signals(worker: int) -> None:
    """Ignore signals to the whole job in a data worker, so that it does not die while the ranks still save.

    Pass it to torch's DataLoader as worker_init_fn. Workers still exit with their rank: they watch their parent.

    Args:
        worker: number of the worker, which torch passes.
    """
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)


def order(
    task: Task, length: int, seed: int, *, total: int, by_length: int | None = None, origin: int = 0
) -> SampleOrder:
    """Return the order of a task's `length` training samples. `by_length`, `origin`: as in ByLength, `batches` and
    `origin`.

    Raises UserError, on every rank alike, where the task cannot tell lengths, or where a window would hold an epoch
    more than once.
    """
    if by_length is None:
        return SampleOrder(length, seed)
    lengths = optional(task, "lengths")
    if lengths is None:
        raise UserError(
            "train.batch.by_length needs samples of different lengths, but this task has no method `lengths`: "
            "remove by_length",
            shared=True,
        )
    most = max(1, length // total)
    if by_length > most:
        raise UserError(
            f"train.batch.by_length: {by_length} global batches of {total} samples are more than the {length} training "
            f"samples; at most {most} can be sorted together",
            shared=True,
        )
    found = lengths()
    if len(found) != length:
        message = f"the task has {length} training samples, but its method `lengths` gives {len(found)}"
        raise UserError(message, shared=True)
    return ByLength(length, seed, found, total=total, batches=by_length, origin=origin)


def training_lists(
    order: SampleOrder,
    *,
    start: int,
    steps: int,
    total: int,
    micro: int,
    world: int,
    rank: int,
    weights: batch.Weights = None,
    lockstep: bool = False,
) -> Iterator[Wanted]:
    """Yield this rank's micro batches for `steps` global batches of `total`, from global position `start` on.

    Empty micro batches are left out, but for the last of a step: all ranks have to take part in the exchange of
    gradients there, so a rank without samples gets the global batch's first one, which is not `real`. With
    `lockstep` none is left out: every micro step of every rank takes part in an exchange.

    Where the order knows lengths, the ranks' shares of a global batch are about equally long in sum, and the micro
    batches of a rank are of samples of similar length.
    """
    parts = batch.micro_batches(total, micro, world, rank, weights, lockstep=lockstep)
    parts = tuple(part for number, part in enumerate(parts) if part or lockstep or number == len(parts) - 1)
    if order.lengths is None:
        pattern = [list(part) or [0] for part in parts]
        steps_of_ids = _in_order(order, pattern, start=start, steps=steps, total=total)
    else:
        sizes = batch.shares(total, world, weights)
        steps_of_ids = _by_length(order, list(map(len, parts)), sizes, rank, start=start, steps=steps)
    for of_step in steps_of_ids:
        for number, (part, (ids, epochs)) in enumerate(zip(parts, of_step, strict=True)):
            yield Wanted(ids, epochs, order.seed, real=len(part) > 0, last=number == len(parts) - 1)


#: Ids and epochs of each micro batch of one step.
_Step = list[tuple[list[int], list[int]]]


def _in_order(order: SampleOrder, pattern: list[list[int]], *, start: int, steps: int, total: int) -> Iterator[_Step]:
    """`pattern`: positions in the global batch of each micro batch."""
    flat = torch.tensor([index for part in pattern for index in part])
    # Many steps' ids in one go, which is what the order is quick at; but not many epochs of a small dataset.
    ahead = max(1, min(_IDS_AT_ONCE // len(flat), 4 * order.length // total))
    for first in range(0, steps, ahead):
        bases = start + total * torch.arange(first, min(first + ahead, steps))
        ids, epochs = order.samples((bases[:, None] + flat).flatten())
        for mine in zip(ids.view(len(bases), -1).tolist(), epochs.view(len(bases), -1).tolist(), strict=True):
            yield _cut(*mine, list(map(len, pattern)))


def _by_length(
    order: SampleOrder, lengths: list[int], sizes: tuple[int, ...], rank: int, *, start: int, steps: int
) -> Iterator[_Step]:
    """`lengths`: samples in each micro batch, 0 for a stand-in. `sizes`: samples in each rank's share."""
    assert order.lengths is not None
    total = sum(sizes)
    for base in range(start, start + steps * total, total):
        ids, epochs = order.samples(torch.arange(base, base + total))
        mine = batch.balanced(order.lengths[ids].tolist(), sizes)[rank]
        positions = torch.tensor([0] * lengths.count(0) + mine)
        yield _cut(ids[positions].tolist(), epochs[positions].tolist(), [size or 1 for size in lengths])


def _cut(ids: list[int], epochs: list[int], sizes: list[int]) -> _Step:
    result, start = [], 0
    for size in sizes:
        result.append((ids[start : start + size], epochs[start : start + size]))
        start += size
    return result


def evaluation_lists(
    count: int, *, micro: int, world: int, rank: int, weights: batch.Weights = None
) -> Iterator[Wanted]:
    """Yield this rank's ids out of the validation set's 0..count-1, at most `micro` at a time."""
    mine = batch.share(count, world, rank, weights)
    for start in range(mine.start, mine.stop, micro):
        end = min(start + micro, mine.stop)
        yield Wanted(list(range(start, end)), last=end == mine.stop)


def load(
    task: Task,
    samples: Samples,
    lists: Iterator[Wanted],
    *,
    rank: int,
    workers: int,
    pin_memory: bool,
    prefetch: int = 2,
) -> Iterator[Micro]:
    generator = torch.Generator()
    # The loader draws its workers' seeds when iteration starts. From a generator of its own, it leaves the
    # model's random stream alone, which has to be the same with and without a resume.
    generator.manual_seed(randomness.derive("loader", rank))
    loader: DataLoader[Any] = DataLoader(
        _Maker(task, samples),
        batch_size=None,
        sampler=lists,
        num_workers=workers,
        collate_fn=_as_it_is,
        worker_init_fn=ignore_signals,
        generator=generator,
        pin_memory=pin_memory,
        prefetch_factor=prefetch if workers else None,
    )
    # Workers are forked with these signals held back, until they ignore them: no moment is left to die in.
    # The rank itself gets what came meanwhile right after.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
    try:
        return _checked(iter(loader))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def to_device(data: T, device: torch.device) -> T:
    """Return tensors in (nested) lists, tuples and mappings moved to the device; anything else as it is."""
    if device.type == "cpu":
        return data
    moved: T = _each_tensor(data, lambda tensor: tensor.to(device, non_blocking=True))
    return moved


def _as_it_is(made: T) -> T:
    return made


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
