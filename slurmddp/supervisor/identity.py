"""Which job this is, and on which host, as Slurm tells its processes."""

import socket
from typing import Mapping


def host(environment: Mapping[str, str]) -> str:
    """Return the node's name, by which Slurm knows it."""
    return environment.get("SLURMD_NODENAME") or socket.gethostname()


def slurm_job(environment: Mapping[str, str]) -> str:
    """Return what commands call the job; empty outside of one. SLURM_JOB_ID of a task is that of the whole array."""
    array = environment.get("SLURM_ARRAY_JOB_ID")
    if array:
        return "{}_{}".format(array, environment.get("SLURM_ARRAY_TASK_ID", ""))
    return environment.get("SLURM_JOB_ID", "")
