"""torch's private names that ranks use, each with the versions in which it was seen."""

import itertools
import os
import sys
from typing import Any

#: The folder of the file in which the ranks of one start meet: nobody else can enter it. Set on one node only, by the
#: agent, or by node.sh with launch.mode srun.
STORE = "SLURMDDP_STORE"
#: Makes the store of `env://` and `tcp://`: torch 2.2 to 2.15. `register_rendezvous_handler` refuses both names.
_MAKER = "_create_c10d_store"


def meet_in_file() -> None:
    """Let `env://` of this process meet the other ranks in a file, which no other user can open.

    Everybody on the node reaches the TCP store of torch, and whoever writes there can join as a rank. Call it when
    torch.distributed is loaded. Without STORE it does nothing. If torch lacks the private name, it says so, and the
    ranks meet as torch has it.
    """
    folder = os.environ.get(STORE)
    if not folder or not os.path.isdir(folder):  # such as in a container that a script of the user's starts
        return
    module: Any = sys.modules.get("torch.distributed.rendezvous")
    plain = getattr(module, _MAKER, None)
    if plain is None:
        import torch

        print(
            f"slurmddp: note: torch {torch.__version__} has no {_MAKER}, so the ranks meet in its TCP store, which any "
            f"user of this node can reach",
            file=sys.stderr,
            flush=True,
        )
        return
    if hasattr(plain, "slurmddp"):
        return
    numbers = itertools.count()

    def make(hostname: str, port: int, rank: int, world_size: int, timeout: Any, *more: Any, **options: Any) -> Any:
        asked = (hostname, str(port), str(rank), str(world_size))
        ours = tuple(os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"))
        if asked != ours:  # a group of the script's own, such as of processes that a rank started
            return plain(hostname, port, rank, world_size, timeout, *more, **options)
        from torch.distributed import FileStore

        # A file for each time: keys of a group that was destroyed would mislead the next one. No number of ranks, at
        # which the last one would remove the file.
        store = FileStore(os.path.join(folder, f"group-{next(numbers)}"), -1)
        store.set_timeout(timeout)
        return store

    make.slurmddp = True  # type: ignore[attr-defined]
    setattr(module, _MAKER, make)
