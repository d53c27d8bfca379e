"""The signs of progress that torch shows in any script: optimizer steps, and collectives of its process groups."""

import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Adam, AdamW
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from slurmddp.records.rank_events import NoProcessGroup, ProcessGroupMade
from slurmddp.runtime import torch_private
from slurmddp.runtime.journal import Events

#: Steps of a start after which its training has begun: a first one may only make the optimizer's state.
ENOUGH = 3


class Parts:
    """Tells which calls of an optimizer's step begin a step: DeepSpeed calls it once for each group of parameters."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def begins(self, optimizer: Optimizer) -> bool:
        """Return whether a call begins a step. The others are for parameters that this step has not had."""
        first = next((id(each) for group in optimizer.param_groups for each in group["params"]), 0)
        begins = not self._seen or first in self._seen
        if begins:
            self._seen.clear()
        self._seen.add(first)
        return begins


class Steps:
    """Count optimizer steps from the moment it is made, by torch's own hook."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._parts: defaultdict[int, Parts] = defaultdict(Parts)
        self._first: int | None = None
        self._newest = 0
        #: Of the optimizer that stepped first: its steps here, `ENOUGH` at most. loaded: whether it had a state before,
        #: which only a loaded one can have. began: its first step here by its own count, if that can be read. A state
        #: that is loaded between two steps begins anew.
        self.calls, self.loaded = 0, False
        self.began: int | None = None
        self._hooks = [register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._count)]
        #: Calls of `step` so far, of all optimizers, and whether a process group was there at one of them.
        self.seen, self.grouped = 0, False
        #: Collectives of all groups when the newest step was done.
        self.issued = 0
        #: Called once after the next step, in the script's own thread. It must be quick, and never raise.
        self.asked: Callable[[], None] | None = None

    @property
    def done(self) -> int:
        """Return how many steps are done. Of several optimizers, the one that steps most often counts."""
        return max(tuple(self._counts.values()), default=0)

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """Called by torch before each step, in the script's own thread: it must be quick, and never raise."""
        if self._first is None:
            self._first = id(optimizer)
            self.loaded = type(optimizer) in (Adam, AdamW) and len(optimizer.state) > 0

    def _count(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """Called by torch after each step, in the script's own thread: it must be quick, and never raise."""
        key = id(optimizer)
        if self._parts[key].begins(optimizer):
            self._count_step(key, optimizer)
        self.grouped = self.grouped or has_group()
        self.seen += 1
        self.issued = issued()
        if (asked := self.asked) is not None:
            self.asked = None
            asked()

    def _count_step(self, key: int, optimizer: Optimizer) -> None:
        if key in self._counts:
            self._counts[key] += 1
        else:
            self._counts[key] = max(own_count(optimizer) or 1, 1)
        if key == self._first and self.calls < ENOUGH:
            count = own_count(optimizer)
            if count is None or self.began is None or count != self._newest + 1:
                self.began = count
            self._newest = count or 0
            self.calls += 1


def own_count(optimizer: Optimizer) -> int | None:
    """Return how many steps an optimizer counts in its state, as Adam and its kin do; None if that is not known."""
    try:
        counts = [state["step"] for state in optimizer.state.values() if "step" in state]
        # Reading it from a GPU would wait for the GPU.
        return max(map(int, counts)) if counts and all(getattr(step, "is_cpu", True) for step in counts) else None
    except Exception:  # noqa: BLE001 - an optimizer of any kind: the script must not notice
        return None


def on_gpu() -> bool:
    """Return whether this process uses a GPU. Asking wakes none."""
    found = (getattr(torch, name, None) for name in ("cuda", "xpu"))  # cuda is also AMD's
    return any(kind is not None and kind.is_initialized() for kind in found)


def has_group() -> bool:
    """Return whether this process has a default process group now."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    return c10d is not None and c10d.is_initialized()


def issued() -> int:
    """Return how many collectives this rank has issued so far, in all of its process groups."""
    return sum(number for _, _, number in torch_private.groups())


#: Libraries that join ranks without a process group of torch.distributed: beside them, its absence says nothing.
_OTHERS = ("horovod", "mpi4py", "ray", "byteps")


class ProcessGroup:
    """Tells, on rank 0 and once per start, if several ranks make steps without a process group, or make one later."""

    def __init__(self, events: Events, world: int) -> None:
        self._events, self._world = events, world
        self._told = False

    def look(self, steps: Steps, *, last: bool = False) -> None:
        """Look again. last: the script is about to exit, so that fewer steps are enough."""
        if self._told:
            if steps.grouped:
                self._told, self._world = False, 1
                self._events.write(ProcessGroupMade())
        elif self._world > 1 and steps.seen >= (1 if last else ENOUGH) and not steps.grouped:
            if any(name in sys.modules for name in _OTHERS):
                self._world = 1
                return
            self._told = True
            text = (
                "no torch.distributed process group was made: unless the script uses another library, "
                f"each of the {self._world} ranks trains a model of its own"
            )
            self._events.write(NoProcessGroup(self._world, text))
