"""Free space where running out of it ends a run. Warnings only: nobody knows what the run will need."""

import os
from collections.abc import Iterator

from slurmddp.runtime.preflight.findings import Finding, warn
from slurmddp.runtime.preflight.node_settings import NodeSettings

_LEAST = 1 << 30
_TODO = {
    "/dev/shm": "data workers and NCCL keep buffers there: remove leftovers of earlier jobs, or set train.workers: 0",
    "run folder": "checkpoints go there: free some space, or choose another paths.runs",
    "node folder": "free some space, or choose another paths.node",
}


def check(settings: NodeSettings) -> Iterator[Finding]:
    for what, path in (("/dev/shm", "/dev/shm"), ("run folder", str(settings.run)), ("node folder", settings.scratch)):
        if not path:
            continue
        try:
            free = available(path)
        except OSError as error:
            yield warn(f"cannot read {path}: {error.strerror}", _TODO[what])
            continue
        if free < _LEAST:
            yield warn(
                f"{what if what == path else f'{what} {path}'} has only {free / (1 << 20):.0f} MiB free", _TODO[what]
            )


def available(path: str) -> int:
    """Return bytes that this user may still write. Raises OSError."""
    state = os.statvfs(path)
    return state.f_bavail * state.f_frsize
