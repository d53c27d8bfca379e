"""The GPUs and the Python of this machine, for jobs that run on it without Slurm."""

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from slurmddp.job.resolve import Resolved
from slurmddp.job.site import Partition

#: Seconds that nvidia-smi may take: some for each GPU where no persistence daemon runs.
_PATIENCE = 15


def with_gpus(resolved: Resolved, environment: Mapping[str, str]) -> Resolved:
    """Return the job with the GPUs of this machine, if its site is this machine and says nothing of GPUs.

    Each rank gets a GPU. With more ranks than GPUs, and no GPUs asked for, the ranks use the cores: they see no GPU.
    """
    site, resources = resolved.site, resolved.job.resources
    if site.queues or site.gpu_vendor != "none":
        return resolved
    if resources.gpus_per_node == 0:
        return _on_the_cores(resolved)
    count = count_gpus(environment)
    ranks = resources.ranks_per_node if isinstance(resources.ranks_per_node, int) else None
    if not count:
        return resolved
    if resources.gpus_per_node is None and (ranks or 0) > count:
        return _on_the_cores(resolved)
    known = {"": Partition.model_construct(gpus_per_node=count)}
    if resources.gpus_per_node is None:
        resources = resources.model_copy(update={"gpus_per_node": ranks or count})
    return resolved._replace(
        site=site.model_copy(update={"gpu_vendor": "nvidia", "gpu_request": "none", "partitions": known}),
        job=resolved.job.model_copy(update={"resources": resources}),
    )


def _on_the_cores(resolved: Resolved) -> Resolved:
    """Return the job with the GPUs hidden from its ranks, which would take them where they see them."""
    environment = {"CUDA_VISIBLE_DEVICES": "", **resolved.job.environment}
    return resolved._replace(job=resolved.job.model_copy(update={"environment": environment}))


def count_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """Return how many NVIDIA GPUs a program that is started here would see."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() and not name.strip().startswith("-")])
    try:
        answer = subprocess.run(
            ["nvidia-smi", "-L"],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PATIENCE,
            check=True,
        )
        return len(re.findall(rb"^GPU \d+:", answer.stdout, re.MULTILINE))
    except (OSError, subprocess.SubprocessError):
        return sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in devices.glob("nvidia*"))


def python_for_torch(environment: Mapping[str, str]) -> str:
    """Return our own Python, or the shell's if ours has no torch, as in an environment of pipx or uv."""
    shells = None if find_spec("torch") else shutil.which("python3", path=environment.get("PATH"))
    return shells or sys.executable
