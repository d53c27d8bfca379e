"""One process group after another over the first ranks of a job: how training runs on fewer nodes than it has."""

import datetime

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from slurmddp.runtime import torch_private, world
from slurmddp.runtime.environment import Environment

#: Ranks that have nothing to do wait as long as this for the others.
_PATIENCE = datetime.timedelta(hours=4)


class Worlds:
    """Every rank makes one, and calls `join` with the same numbers."""

    def __init__(self, env: Environment, *, timeout: float) -> None:
        torch_private.meet_privately()
        self._env, self._timeout, self._number = env, timeout, 0
        self._store: dist.Store = next(iter(rendezvous("env://", timeout=datetime.timedelta(seconds=timeout))))[0]

    def join(self, size: int) -> world.World | None:
        """Leave the group before, and join that of the first `size` ranks; None for a rank that is not among them, once
        these have left theirs.
        """
        self.leave()
        self._number += 1
        if self._env.rank >= size:
            self._store.wait([f"tune/{self._number}/over"], _PATIENCE)
            return None
        store = dist.PrefixStore(f"tune/{self._number}", self._store)
        return world.start(self._env, timeout=self._timeout, store=store, size=size)

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
            if self._env.rank == 0:
                self._store.set(f"tune/{self._number}/over", "1")
