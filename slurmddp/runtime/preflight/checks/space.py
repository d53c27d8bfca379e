"""Free space where running out of it ends a run. Mostly warnings: nobody knows what the run will need."""

import os
from collections.abc import Iterator

from slurmddp.records.preflight import Finding, bad, warn
from slurmddp.runtime.preflight.checks.folders import train_section
from slurmddp.runtime.preflight.node_settings import NodeSettings
from slurmddp.shared.run_folder import RunFolder

_LEAST = 1 << 30
#: What a Docker container has by default. PyTorch's README calls it too little for data workers.
_LEAST_SHARED = 64 << 20
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
            level = bad if what == "/dev/shm" and free < _LEAST_SHARED and shares_memory(settings) else warn
            where = what if what == path else f"{what} {path}"
            yield level(f"{where} has only {free / (1 << 20):.0f} MiB free", _TODO[what])


def shares_memory(settings: NodeSettings) -> bool:
    """Return whether the ranks surely use /dev/shm: NCCL between GPUs of a node, or data workers of a bundled task."""
    return settings.gpus > 1 or bool(train_section(RunFolder(settings.run).job_json).get("workers"))


def available(path: str) -> int:
    state = os.statvfs(path)
    return state.f_bavail * state.f_frsize
