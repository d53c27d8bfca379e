"""The limits that Slurm and the container hand on to the ranks: locked memory and open files."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from slurmddp.records.preflight import Finding, bad, warn
from slurmddp.runtime.preflight.checks import rdma
from slurmddp.runtime.preflight.node_settings import NodeSettings

#: NCCL registers at least one buffer of NCCL_BUFFSIZE (4 MiB) for each of 16 channels. 8 MiB were too little in
#: NVIDIA/nccl-tests#206; NCCL's troubleshooting page asks for `unlimited`.
_LEAST_LOCKED = 64 << 20
_LOCKED = "ask the site's support for LimitMEMLOCK=infinity in slurmd's service (PropagateResourceLimitsExcept=MEMLOCK)"
_ADAPTERS = Path("/sys/class/infiniband")
#: A rank has a socket for each other rank in each of its gloo groups, and as many again in NCCL; and files of its own.
_FILES_PER_RANK, _OWN_FILES = 4, 256
#: As inherited: the head raises its own before the checks run.
_OPEN_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
_FILES = "ask the site's support to raise the limit (LimitNOFILE of slurmd's service), or put `ulimit -n` in setup"


def check(settings: NodeSettings) -> Iterator[Finding]:
    """Locked memory matters only where NCCL may use RDMA."""
    if rdma.wanted(settings, os.environ) and rdma.drivers(_ADAPTERS):
        yield from locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    ranks = len(settings.nodes) * max(1, settings.gpus)
    yield from open_files(_OPEN_FILES, ranks)


def locked_memory(limit: int) -> Iterator[Finding]:
    """limit: bytes, or RLIM_INFINITY."""
    if limit == resource.RLIM_INFINITY:
        return
    if limit < _LEAST_LOCKED:
        reason = f"may lock only {limit >> 10} KiB of memory (ulimit -l), and NCCL needs more for RDMA"
        yield bad(reason, _LOCKED)
    else:
        yield warn(f"may lock only {limit >> 20} MiB of memory (ulimit -l): NCCL may need more for RDMA", _LOCKED)


def open_files(limit: int, ranks: int) -> Iterator[Finding]:
    """limit: of one process; ranks: of the whole job."""
    needed = _OWN_FILES + _FILES_PER_RANK * ranks
    if limit != resource.RLIM_INFINITY and limit < needed:
        yield warn(f"may open only {limit} files per process (ulimit -n), and {ranks} ranks may need {needed}", _FILES)
