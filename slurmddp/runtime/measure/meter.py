"""Exact means over all samples of all ranks, however the samples are split.

Usable in a user's own script, under torchrun or alone:

>>> meter = Meter("loss", "accuracy")
>>> for losses, hits in [([0.5, 1.5], 1), ([4.0], 1)]:
...     meter.add("loss", sum(losses), len(losses))
...     meter.add("accuracy", hits, len(losses))
>>> meter.reduce()["loss"]
2.0
"""

import torch
import torch.distributed as dist


class Vector:
    """A float64 vector that is added to on this rank, and summed over the ranks once.

    Sums lose nothing that matters, and counts are exact up to 2**53. On a GPU nothing here waits for it before
    the result is read.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._device = device
        self._host = [0.0] * size
        self._on_device: dict[int, torch.Tensor] = {}

    def add(self, index: int, value: torch.Tensor | float) -> None:
        if not isinstance(value, torch.Tensor):
            self._host[index] += value
        elif self._device.type == "cpu":
            self._host[index] += value.item()
        else:
            before = self._on_device.get(index)
            now = value.detach().to(self._device).double()
            self._on_device[index] = now if before is None else before + now

    def reduce(self, group: dist.ProcessGroup | None = None) -> "Pending":
        """Start adding up over all ranks: a collective. Alone, outside of a process group, it is done at once."""
        # A copy that blocks would wait for all that the GPU still has to do.
        vector = torch.tensor(self._host, dtype=torch.float64).to(self._device, non_blocking=True)
        for index, value in self._on_device.items():
            vector[index] += value
        if not dist.is_available() or not dist.is_initialized():
            return Pending(vector, None)
        return Pending(vector, dist.all_reduce(vector, group=group, async_op=True))


class Pending:
    """A sum over ranks on its way."""

    def __init__(self, vector: torch.Tensor, work: dist.Work | None) -> None:
        #: On the device; only what is on its stream after `arrive` may use it.
        self.vector, self._work = vector, work
        self._sent: torch.cuda.Event | None = None

    def arrive(self) -> None:
        """Wait for the other ranks; on a GPU only its stream waits, not the caller."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def send(self, more: torch.Tensor) -> None:
        """Start to copy the sum and one more number to the host: `wait` then waits for that, not for the device."""
        self.vector = torch.cat((self.vector, more.view(1))).to("cpu", non_blocking=True)  # into pinned memory
        self._sent = torch.cuda.current_stream(more.device).record_event() if more.is_cuda else None

    def wait(self) -> list[float]:
        self.arrive()
        if self._sent is not None:
            self._sent.synchronize()
        values: list[float] = self.vector.tolist()
        return values


class Meter:
    """Compute named means over all ranks. All ranks give the same names, so a rank without samples takes part, too."""

    def __init__(self, *names: str, device: torch.device | str | None = None) -> None:
        """Create a meter.

        Args:
            names: names of the means.
            device: device of the all-reduce; default: the current GPU with nccl, else the CPU.

        Raises:
            ValueError: there are no names, or one is given twice.
        """
        if not names or len(set(names)) != len(names):
            raise ValueError(f"a meter needs names, each once, not {names!r}")
        self._index = {name: 2 * number for number, name in enumerate(names)}
        self._device = reduction_device() if device is None else torch.device(device)
        self._vector = self._new()

    def add(self, name: str, total: torch.Tensor | float, count: torch.Tensor | float) -> None:
        """Add a sum of values to one mean.

        Args:
            name: one of the names.
            total: sum of the values (not their mean), a number or a scalar tensor.
            count: number of values in `total`, such as samples or targets.

        Raises:
            KeyError: the name is unknown.
        """
        index = self._index[name]
        self._vector.add(index, total)
        self._vector.add(index + 1, count)

    def reduce(self) -> dict[str, float]:
        """Return the mean of each name over all ranks (nan if nothing was added), and reset the meter.

        Every rank must call it, also one without samples.
        """
        pending, self._vector = self._vector.reduce(), self._new()
        values = pending.wait()
        counts = {name: values[index + 1] for name, index in self._index.items()}
        return {name: values[self._index[name]] / count if count else float("nan") for name, count in counts.items()}

    def _new(self) -> Vector:
        return Vector(2 * len(self._index), self._device)


def reduction_device() -> torch.device:
    """Return where tensors of an all-reduce lie: on this rank's GPU with nccl, else on the CPU."""
    if dist.is_available() and dist.is_initialized() and "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
