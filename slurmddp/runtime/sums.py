"""Sums and counts over micro batches and ranks, reduced once."""

import torch
import torch.distributed as dist

from slurmddp.runtime.tasks.protocol import Loss, Task

LOSS, COUNT, BAD = 0, 1, 2
_FIXED = 3


class Sums:
    """Loss, targets, losses that are not finite, the task's metrics, and further slots of the caller's own.

    One float64 vector: sums lose nothing that matters, and counts are exact up to 2**53. On a GPU nothing
    here waits for it before `reduce` is read.
    """

    def __init__(self, task: Task, device: torch.device, extra: int = 0) -> None:
        self._names = list(task.metrics)
        self._device = device
        self._extra = _FIXED + 2 * len(self._names)
        self._host = [0.0] * (self._extra + extra)
        self._on_device: dict[int, torch.Tensor] = {}

    def add_loss(self, loss: Loss) -> None:
        """Add one micro batch. A loss that is not finite is counted, and left out of the sum."""
        total = loss.total.detach()
        finite = torch.isfinite(total)
        self._add(LOSS, torch.where(finite, total, torch.zeros_like(total)))
        self._add(BAD, ~finite)
        self._add(COUNT, loss.count)
        for number, name in enumerate(self._names):
            value, count = loss.metrics[name]
            self._add(_FIXED + 2 * number, value)
            self._add(_FIXED + 2 * number + 1, count)

    def add_extra(self, slot: int, value: float) -> None:
        """Add to one of the caller's own slots."""
        self._host[self._extra + slot] += value

    def _add(self, index: int, value: torch.Tensor | float) -> None:
        if not isinstance(value, torch.Tensor):
            self._host[index] += value
        elif self._device.type == "cpu":
            self._host[index] += value.item()
        else:
            before = self._on_device.get(index)
            now = value.detach().double()
            self._on_device[index] = now if before is None else before + now

    def reduce(self) -> "Reduction":
        """Start adding up over all ranks. Every rank has to call it, at the same point between other
        collectives.
        """
        vector = torch.tensor(self._host, dtype=torch.float64).to(self._device)
        for index, value in self._on_device.items():
            vector[index] += value
        work = dist.all_reduce(vector, async_op=True)
        assert work is not None
        return Reduction(vector, work, self._names, self._extra)


class Reduction:
    """A reduction on its way; `wait` gives the sums over all ranks."""

    def __init__(self, vector: torch.Tensor, work: dist.Work, names: list[str], extra: int) -> None:
        self._vector = vector
        self._work = work
        self._names = names
        self._extra = extra

    def wait(self) -> "Totals":
        """The sums over all ranks."""
        self._work.wait()
        return Totals(self._vector.tolist(), self._names, self._extra)


class Totals:
    """Sums over all ranks."""

    def __init__(self, values: list[float], names: list[str], extra: int) -> None:
        self._values = values
        self._names = names
        self._extra = extra

    @property
    def count(self) -> int:
        """Targets."""
        return int(self._values[COUNT])

    @property
    def not_finite(self) -> int:
        """Micro batches whose loss was not finite."""
        return int(self._values[BAD])

    def extra(self, slot: int) -> float:
        """One of the caller's own slots."""
        return self._values[self._extra + slot]

    def means(self) -> dict[str, float]:
        """Mean loss per target, and the mean of each metric. Needs a count above zero."""
        result = {"loss": self._values[LOSS] / self._values[COUNT]}
        for number, name in enumerate(self._names):
            value, count = self._values[_FIXED + 2 * number : _FIXED + 2 * number + 2]
            result[name] = value / count if count else float("nan")
        return result
