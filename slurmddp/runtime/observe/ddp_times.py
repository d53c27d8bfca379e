"""How long DistributedDataParallel waited for the others' gradients, as it measures that itself.

It does so in its first ten steps, and then in each hundredth one, whether anybody asks or not; on GPUs with events that
it waits for itself.
"""

import threading
import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.nn.parallel import DistributedDataParallel

from slurmddp.runtime import torch_private
from slurmddp.runtime.watch.process_exit import say

_NANOSECONDS = 1e9


class Times(NamedTuple):
    """Seconds per step. exposed: waiting for gradients with nothing left to compute. overlap: computing meanwhile."""

    exposed: float
    overlap: float


@dataclass
class _Module:
    """One DDP module. measured: the newest step that it measured; times: of the steps since the last window."""

    ref: "weakref.ref[DistributedDataParallel]"
    measured: int = 1  # the first step also makes the connections
    times: list[Times] = field(default_factory=list)
    fresh: bool = False


class DdpTimes:
    """Finds the script's DDP modules and reads their logging data."""

    def __init__(self, main: int) -> None:
        self._main = main
        self._modules: tuple[_Module, ...] = ()
        self._failed = False

    def look(self) -> bool:
        """Keep the module that is in its forward pass just now; return whether there is anything to read."""
        active = torch_private.ddp_in_forward()
        if active is not None and all(each.ref() is not active for each in self._modules):
            alive = tuple(each for each in self._modules if each.ref() is not None)
            self._modules = (*alive, _Module(weakref.ref(active)))
        return bool(self._modules) and not self._failed

    def read(self) -> None:
        """Take what is new, in the script's own thread after a step. It never raises.

        DDP holds a lock while it waits for gradients: any other thread would wait with it, and so would this one if it
        were called from within the backward pass.
        """
        try:
            if threading.get_ident() != self._main or torch_private.in_backward():
                return
            for module in self._modules:
                ddp: Any = module.ref()
                if ddp is not None:
                    _take(module, torch_private.ddp_data(ddp))
        except Exception as error:  # noqa: BLE001 - the script must not notice
            self._failed = True
            say(f"slurmddp: warning: DDP's own times are not read: {type(error).__name__}: {error}\n")

    def window(self) -> Times | None:
        """Return the mean since the last call, of all modules together; without new figures, the newest ones.

        None without any.
        """
        found = [_mean(module) for module in self._modules if module.times and module.ref() is not None]
        if not found or self._failed:
            return None
        return Times(*map(sum, zip(*found, strict=True)))


def _take(module: _Module, data: dict[str, Any]) -> None:
    measured = data.get("iteration", 0)
    network, overlap = data.get("backward_comm_time"), data.get("backward_compute_comm_overlap_time")
    if measured <= module.measured or network is None or overlap is None:
        return
    module.measured = measured
    if not module.fresh:
        module.times, module.fresh = [], True
    module.times.append(Times(max(network - overlap, 0) / _NANOSECONDS, max(overlap, 0) / _NANOSECONDS))


def _mean(module: _Module) -> Times:
    times = module.times
    module.fresh = False
    return Times(*(sum(part) / len(times) for part in zip(*times, strict=True)))
