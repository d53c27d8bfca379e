"""PyTorch's flight recorder: the newest collectives of this rank, as `slurmddp doctor` reads them."""

import sys
from pathlib import Path

from slurmddp.runtime.watch.process_exit import say


def dump(path: Path) -> bool:
    """Write them, without stacks; return whether this torch has a recorder for them. Raises nothing."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        # NCCL has a recorder of its own. Older versions of torch have no other one.
        nccl = c10d is not None and any("nccl" in str(name) for name, _ in c10d._world.pg_map.values())
        recorders = sys.modules.get("torch._C._distributed_c10d")
        take = getattr(recorders, "_dump_nccl_trace" if nccl else "_dump_fr_trace", None)
        if take is None:
            return False
        path.write_bytes(take(includeStackTraces=False))
    except Exception as error:  # noqa: BLE001 - the stacks are there, and the ranks may have to restart
        say(f"slurmddp: warning: {path.name}: no dump of the flight recorder: {type(error).__name__}: {error}\n")
        return False
    return True
