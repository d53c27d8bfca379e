"""What runs on the nodes, inside the container: one process per rank, started by torchrun.

It uses only the standard library and torch (tasks/images.py alone may use numpy and PIL). Importing this module loads
nothing else: torch is loaded with the first name that needs it.

Your own training script can import these names. Each works without the others, under torchrun or alone, and has an
example in its documentation (`python -m pydoc slurmddp.runtime.library`):

    distributed       join and leave the process group, note signals, exit at once after an error
    GlobalSampler     the same samples in each step, on any number of ranks, from any position
    Checkpointer      asynchronous, hashed, atomic checkpoints of a plain, DDP or FSDP2 model, and resuming
    process_groups    the groups of a model that is parallel in several ways
    should_stop       whether any rank was asked to stop, the same answer on all ranks
    Meter             exact means over all ranks
    StepTimer         seconds per part of a step
    mean_over_ranks   the loss for backward(), if ranks have different numbers of targets
    ignore_signals    worker_init_fn for data loaders, so that workers do not die while the ranks save
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slurmddp.runtime.data.loading import ignore_signals
    from slurmddp.runtime.library.checkpointer import Checkpointer
    from slurmddp.runtime.library.groups import process_groups
    from slurmddp.runtime.library.sampler import GlobalSampler, mean_over_ranks
    from slurmddp.runtime.library.setup import distributed
    from slurmddp.runtime.library.shared import should_stop
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
    "process_groups",
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
    "process_groups": "library.groups",
    "should_stop": "library.shared",
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
