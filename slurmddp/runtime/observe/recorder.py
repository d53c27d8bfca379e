"""PyTorch's flight recorder: the newest collectives of this rank, as `slurmddp doctor` reads them."""

from pathlib import Path

from slurmddp.runtime import torch_private
from slurmddp.runtime.watch.process_exit import say


def dump(path: Path) -> bool:
    """Write them, without stacks; return whether this torch has a recorder for them. Raises nothing."""
    try:
        found = torch_private.flight_recorder()
        if found is None:
            return False
        path.write_bytes(found)
    except Exception as error:  # noqa: BLE001 - the stacks are there, and the ranks may have to restart
        say(f"slurmddp: warning: {path.name}: no dump of the flight recorder: {type(error).__name__}: {error}\n")
        return False
    return True
