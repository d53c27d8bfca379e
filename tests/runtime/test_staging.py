"""Memory for copies of a GPU's tensors, with a driver that is not CUDA's."""

from typing import Any
from unittest import mock

import torch

from slurmddp.runtime.checkpoint import staging


class Driver:
    """CUDA's, which refuses to register an address twice."""

    def __init__(self) -> None:
        self.registered: set[int] = set()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        refused = address in self.registered
        self.registered.add(address)
        return 712 if refused else 0

    def cudaHostUnregister(self, address: int) -> int:
        self.registered.remove(address)
        return 0


def test_memory_of_copies_is_unregistered_with_and_without_a_close() -> None:
    driver, checks = Driver(), []

    def check(*_: Any, **__: Any) -> None:
        checks.append("CUDA's next check")
        raise RuntimeError("part or all of the requested memory range is already mapped")

    memory = staging._memory(4096)
    with mock.patch.multiple(torch.cuda, cudart=lambda: driver, Stream=mock.Mock(), Event=mock.Mock()):
        copies = staging._GpuCopies(memory, 4096, torch.device("cpu"))
        with mock.patch.object(torch, "zeros", check):
            again = staging._GpuCopies(memory, 4096, torch.device("cpu"))
        assert checks, "what was refused stays CUDA's last error until a check takes it"
        again.close()
        assert driver.registered
        copies.close()
        assert not driver.registered
        copies = staging._GpuCopies(memory, 4096, torch.device("cpu"))
        assert driver.registered
        del copies
        assert not driver.registered
