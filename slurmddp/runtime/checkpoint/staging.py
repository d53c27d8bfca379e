"""Copies of this rank's part of the state, which are written while training continues.

The memory is one mapping, taken and touched once and used for every save. Data workers do not inherit it:
after a fork, each page of an inherited one would be copied again on the next save.
"""

import contextlib
import mmap
import weakref
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch

from slurmddp.runtime import torch_private
from slurmddp.runtime.checkpoint.shards import Part

_ALIGNMENT = 64

#: A copy, and the live tensor that goes there.
Pair = tuple[torch.Tensor, torch.Tensor]


class Staging:
    """Memory for `own`, one rank's parts in a plan. `device`: where the live tensors are.

    Raises MemoryError or OSError where there is not enough. `parts`: the copies, CPU tensors.
    """

    def __init__(self, own: Sequence[Part], tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        live = [_part(tensors, name) for name, _ in own]
        offsets, end = [], 0
        for tensor in live:
            offsets.append(end)
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.bytes = sum(tensor.nbytes for tensor in live)
        self._memory = _memory(end)
        self.parts: dict[Part, torch.Tensor] = {
            part: _carve(self._memory, offset, tensor) for part, offset, tensor in zip(own, offsets, live, strict=True)
        }
        self._gpu = _GpuCopies(self._memory, end, device) if device.type == "cuda" and end else None

    def fill(self, tensors: Mapping[str, torch.Tensor], urgent: Set[str] = frozenset()) -> None:
        """Copy the live tensors.

        On CPU they may change afterwards. On a GPU the copies continue after the call: `hold` before the
        tensors change. Those named in `urgent`, small ones that change earlier, may change at once.
        """
        with torch.no_grad():
            pairs = [(name, copy, _part(tensors, name)) for (name, _), copy in self.parts.items()]
            first = [(copy, live) for name, copy, live in pairs if name in urgent]
            later = [(copy, live) for name, copy, live in pairs if name not in urgent]
            if self._gpu is None:
                _copy(first + later)
            else:
                self._gpu.start(first, later)

    def hold(self) -> None:
        """Make the GPU's current stream wait for the copies; the calling thread continues at once."""
        if self._gpu is not None:
            self._gpu.hold()

    def wait(self) -> None:
        if self._gpu is not None:
            self._gpu.wait()

    def close(self) -> None:
        """Give the memory back to the GPU's driver; nothing may be copied afterwards."""
        if self._gpu is not None:
            self._gpu.close()
            self._gpu = None


class _GpuCopies:
    """Copies into pinned memory on a stream of their own."""

    def __init__(self, memory: mmap.mmap, size: int, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        # Registering what we have: torch's own pinned memory comes in powers of two.
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        registered = int(driver.cudaHostRegister(address, size, 0)) == 0
        if not registered:
            # The copies are still right, and hold up the steps for as long as they take. CUDA keeps the refusal for
            # its next check of a kernel, which raises it: this one's.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=device)
        # Also without a `close`: an address that was unmapped while registered is refused when it is used again.
        self.close = weakref.finalize(self, _release, driver, memory, address if registered else None, self._done)
        self.close.atexit = False

    def start(self, first: list[Pair], later: list[Pair]) -> None:
        present = torch.cuda.current_stream(self._device)
        _copy(first, non_blocking=True)
        self._stream.wait_stream(present)  # For the values, and for `first`.
        with torch.cuda.stream(self._stream):
            _copy(later, non_blocking=True)
            self._done.record(self._stream)

    def hold(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._done)

    def wait(self) -> None:
        self._done.synchronize()


def _release(driver: Any, memory: mmap.mmap, address: int | None, done: Any) -> None:
    """End the copies into `memory`, which is mapped until then, and give it back to the GPU's driver."""
    done.synchronize()
    if address is not None:
        driver.cudaHostUnregister(address)


def _copy(pairs: list[Pair], non_blocking: bool = False) -> None:
    if pairs:
        copies, live = zip(*pairs, strict=True)
        torch_private.foreach("copy_")(copies, live, non_blocking=non_blocking)  # One call for what may be thousands.


def _part(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """The tensor itself, or this rank's shard of it."""
    tensor = tensors[name].detach()
    shard: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return shard


def _memory(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
        if hasattr(mmap, advice):
            with contextlib.suppress(OSError):  # A kernel without it: slower, and no less right.
                memory.madvise(getattr(mmap, advice))
    torch.frombuffer(memory, dtype=torch.uint8).zero_()  # The first save need not wait for the kernel's pages.
    return memory


def _carve(memory: mmap.mmap, offset: int, like: torch.Tensor) -> torch.Tensor:
    """A tensor at `offset` whose storage ends where it ends, so that it is written without another copy."""
    if like.numel() == 0:
        return torch.empty(like.shape, dtype=like.dtype)
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=like.nbytes, offset=offset)
    return flat.view(like.dtype).view(like.shape)
