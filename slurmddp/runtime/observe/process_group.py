"""Whether the ranks of a script of the user's own work together at all: whether they made a process group."""

import sys

from slurmddp.records.rank_events import NoProcessGroup, ProcessGroupMade
from slurmddp.runtime.journal import Events
from slurmddp.runtime.observe.signs import ENOUGH, Steps

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
