"""Sums and counts over micro batches and ranks, reduced once."""

import math

import torch
import torch.distributed as dist

from slurmddp.runtime.measure.meter import Pending, Vector
from slurmddp.runtime.tasks.protocol import Loss, Task

LOSS, COUNT, BAD = 0, 1, 2
_FIXED = 3


class LossAccumulator:
    """Loss, targets, losses that are not finite, the task's metrics, and further slots of the caller's own."""

    def __init__(self, task: Task, device: torch.device, extra: int = 0) -> None:
        self._names = list(task.metrics)
        self._extra = _FIXED + 2 * len(self._names)
        self._vector = Vector(self._extra + extra, device)

    def add_loss(self, loss: Loss) -> None:
        """Add one micro batch. A loss that is not finite is counted, and left out of the sum."""
        total = loss.total.detach()
        if total.device.type == "cpu":  # Nothing to wait for: numbers are quicker than tensors of one.
            own = total.item()
            self._vector.add(*((LOSS, own) if math.isfinite(own) else (BAD, 1.0)))
        else:
            finite = torch.isfinite(total)
            self._vector.add(LOSS, torch.where(finite, total, torch.zeros_like(total)))
            self._vector.add(BAD, ~finite)
        self._vector.add(COUNT, loss.count)
        for number, name in enumerate(self._names):
            value, count = loss.metrics[name]
            self._vector.add(_FIXED + 2 * number, value)
            self._vector.add(_FIXED + 2 * number + 1, count)

    def add_extra(self, slot: int, value: float) -> None:
        self._vector.add(self._extra + slot, value)

    def reduce(self, group: dist.ProcessGroup | None = None) -> "Totals":
        """Start adding up over all ranks, in `group` or their default one: a collective."""
        return Totals(self._vector.reduce(group), self._names, self._extra)


class Totals:
    """Sums over all ranks, on their way until `wait` has returned."""

    def __init__(self, pending: Pending, names: list[str], extra: int) -> None:
        self.pending, self._names, self._extra = pending, names, extra
        self._values: list[float] = []

    def wait(self) -> "Totals":
        """Return these sums once they are there."""
        self._values = self.pending.wait()
        return self

    @property
    def count(self) -> int:
        """Targets."""
        return int(self._values[COUNT])

    @property
    def not_finite(self) -> int:
        """Micro batches whose loss was not finite."""
        return int(self._values[BAD])

    def extra(self, slot: int) -> float:
        return self._values[self._extra + slot]

    def means(self) -> dict[str, float]:
        """Return mean loss per target, and the mean of each metric; nan if nothing was counted."""
        count = self._values[COUNT]
        result = {"loss": self._values[LOSS] / count if count else float("nan")}
        for number, name in enumerate(self._names):
            value, count = self._values[_FIXED + 2 * number : _FIXED + 2 * number + 2]
            result[name] = value / count if count else float("nan")
        return result
