"""How much memory some steps need: of the GPU as torch allocates it, or on a CPU of the whole process."""

import gc
from pathlib import Path
from typing import Any

import torch

from slurmddp.runtime.data.loading import Micro, to_device
from slurmddp.runtime.precision import PRECISIONS, autocast
from slurmddp.runtime.session import Session

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
#: What torch says of an allocation that failed, where it raises a plain RuntimeError.
_FAILED = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "out of memory")


class Meter:
    """Peaks since `reset`. What the process had when this was made is not counted."""

    def __init__(self, device: torch.device, limit: int | None) -> None:
        """limit: bytes that the process may have; None: all of the GPU's that nobody else uses, unknown on a CPU."""
        self._cuda = device.type == "cuda"
        self._device = device
        self._base = 0 if self._cuda else _resident("VmRSS")
        #: Bytes that `needed` may reach; None: unknown.
        self.limit = limit
        if self._cuda:
            free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
            self.limit = free if limit is None else min(free, limit)
        elif limit is not None:
            self.limit = max(0, limit - self._base)

    def reset(self) -> None:
        """Give back what nobody uses, and forget the peak."""
        release(self._device)
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            _CLEAR.write_text("5")  # proc(5): resets VmHWM

    def peak(self) -> int:
        """Return the bytes of tensors at most; on a CPU of all memory."""
        return torch.cuda.max_memory_allocated(self._device) if self._cuda else self.needed()

    def needed(self) -> int:
        """Return the bytes that were taken at most: on a GPU also what torch keeps for later."""
        if self._cuda:
            return torch.cuda.max_memory_reserved(self._device)
        return max(0, _resident("VmHWM") - self._base)


def release(device: torch.device) -> None:
    """Free what is in cycles, such as a model that nobody uses any more, and give it back to the GPU."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.cuda.OutOfMemoryError) or any(text in str(error) for text in _FAILED)


def parameters(session: Session) -> int:
    """Return the bytes of the model's parameters, or of this rank's view of them."""
    return sum(item.numel() * item.element_size() for item in session.parallel.module.parameters())


def activations(session: Session, one: Micro, two: Micro) -> int:
    """Return the bytes that forward keeps for backward per sample. two: a micro batch with one sample more than `one`.

    What does not grow with the batch, such as weights in another precision, cancels out.
    """
    return max(0, _kept(session, two) - _kept(session, one))


def _kept(session: Session, micro: Micro) -> int:
    parallel, device = session.parallel, session.world.device
    weights = {item.untyped_storage().data_ptr() for item in parallel.module.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}  # alive, so that no two share an address

    def note(tensor: torch.Tensor) -> None:
        # Nothing goes backward. An output that its own node keeps would never be freed, and the model with it.
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage

    hooks: Any = torch.autograd.graph.saved_tensors_hooks
    precision = PRECISIONS[session.job.train.precision]
    with parallel.exchanging(last=False), hooks(note, lambda _: None), autocast(device, precision):
        session.data.task.loss(parallel.model, to_device(micro.data, device))
    return sum(storage.nbytes() for storage in kept.values())


def _resident(name: str) -> int:
    """Return a number of this process's status file, in bytes."""
    for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS} has no {name}")
