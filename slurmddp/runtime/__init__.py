"""What runs on the nodes, inside the container: one process a rank, started by torchrun.

Standard library and torch only (tasks/images.py alone may use numpy and PIL). This module imports nothing by
itself: torch is loaded with the first name that needs it.

A training script of one's own takes from it what it needs; each name works without the others, under torchrun or
alone, and has an example in its documentation (`python -m pydoc slurmddp.runtime.library`):

    distributed       set-up and tear-down of the process group; signals noted; an error ends the process at once
    GlobalSampler     the same samples in each step on any number of ranks, from any position on
    Checkpointer      asynchronous, hashed, atomic checkpoints of a plain, DDP or FSDP2 model, and resuming
    should_stop       whether any rank was asked to stop, the same answer on all of them
    Meter             exact means over all ranks
    StepTimer         where the time of a step goes
    mean_over_ranks   the loss to go backward from, where ranks have different numbers of targets
    ignore_signals    worker_init_fn for data loaders, whose workers must not die while the ranks save
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slurmddp.runtime.data.loading import ignore_signals
    from slurmddp.runtime.library.checkpointer import Checkpointer
    from slurmddp.runtime.library.sampler import GlobalSampler, mean_over_ranks
    from slurmddp.runtime.library.setup import distributed
    from slurmddp.runtime.library.stopping import should_stop
    from slurmddp.runtime.measure.meter import Meter
    from slurmddp.runtime.measure.timing import StepTimer

__all__ = [
    "Checkpointer",
    "GlobalSampler",
    "Meter",
    "StepTimer",
    "distributed",
    "ignore_signals",
    "mean_over_ranks",
    "should_stop",
]

_MODULES = {
    "Checkpointer": "library.checkpointer",
    "GlobalSampler": "library.sampler",
    "Meter": "measure.meter",
    "StepTimer": "measure.timing",
    "distributed": "library.setup",
    "ignore_signals": "data.loading",
    "mean_over_ranks": "library.sampler",
    "should_stop": "library.stopping",
}


def __getattr__(name: str) -> Any:
    """Import a piece when it is asked for, and torch with it."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
