"""Who leads a job: the name of the one file in RUN_FOLDER/lease, GENERATION.RENEWAL.HOLDER.

It is renamed at each renewal, and where another process takes over. A rename happens once, on the server of the file
system, and fails where the name is gone: of two that want to take over, one does, and whoever wakes up late learns from
its own renewal that it does not lead any more. Nothing is read and then written.
"""

import os
from typing import List, NamedTuple, Optional

FOLDER = "lease"


class Lease(NamedTuple):
    """generation: rises with each leader. renewal: rises while that leads. holder: TOKEN.HOST, of one process."""

    generation: int
    renewal: int
    holder: str

    @property
    def host(self) -> str:
        return self.holder.partition(".")[2]


def new_holder(host: str) -> str:
    """Return a name of this process: another one of the same host is another holder."""
    return "{}.{}".format(os.urandom(4).hex(), host)


def newest(folder: str) -> Optional[Lease]:
    """Return the lease; None if there is none yet. A listing may be old, or miss a name that is just renamed."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return None
    parts: List[List[str]] = [name.split(".", 2) for name in names]
    leases = [Lease(int(part[0]), int(part[1]), part[2]) for part in parts if len(part) == 3]
    return max(leases) if leases else None


def _name(lease: Lease) -> str:
    return "{}.{}.{}".format(*lease)


def _move(folder: str, old: Lease, new: Lease) -> bool:
    """Rename the lease. Return whether this process did it."""
    try:
        os.rename(os.path.join(folder, _name(old)), os.path.join(folder, _name(new)))
    except FileNotFoundError:
        # NFS may have repeated a rename whose answer was lost. Nobody else makes this name.
        return os.path.exists(os.path.join(folder, _name(new)))
    return True


def take(folder: str, seen: Lease, holder: str) -> Optional[Lease]:
    """Take over from a leader whose lease is still the one that was seen. Return the new lease; None: it is not."""
    new = Lease(seen.generation + 1, 0, holder)
    return new if _move(folder, seen, new) else None


def begin(folder: str, holder: str) -> Lease:
    """Lead from now on, at the start of a job: earlier ones are over. Return the lease. Raises OSError."""
    os.makedirs(folder, exist_ok=True)
    if newest(folder) is None:
        with open(os.path.join(folder, _name(Lease(0, 0, "none.none"))), "x"):
            pass
    seen = newest(folder)
    new = seen and take(folder, seen, holder)
    if not new:
        raise OSError("the lease in {} was renamed meanwhile".format(folder))
    return new


def renew(folder: str, lease: Lease) -> Optional[Lease]:
    """Return the renewed lease; None if another process leads. Raises OSError if that is not known."""
    for _ in range(2):
        new = lease._replace(renewal=lease.renewal + 1)
        if _move(folder, lease, new):
            return new
        found = newest(folder)
        if found is None or found.generation < lease.generation:
            raise OSError("no lease in {}".format(folder))  # or an old listing
        if found.generation > lease.generation:
            return None
        lease = found  # another child of our parent has renewed it
    raise OSError("the lease in {} cannot be renewed".format(folder))
