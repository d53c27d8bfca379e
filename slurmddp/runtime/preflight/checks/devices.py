"""The GPUs that a rank will see: as many as were asked for?"""

import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from slurmddp.records.preflight import Finding, bad
from slurmddp.runtime.preflight.node_settings import NodeSettings

#: Seconds that nvidia-smi may take: some for each GPU where no persistence daemon runs.
_PATIENCE = 25.0
_VISIBLE = {"nvidia": ("CUDA_VISIBLE_DEVICES",), "amd": ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")}
_DRIVER = {"nvidia": "nvidiactl", "amd": "kfd"}
_TODO = "run nvidia-smi or rocm-smi on the node; if a GPU is missing, ask the site's support to drain the node"


def check(settings: NodeSettings) -> Iterator[Finding]:
    """Yield nothing to check where no GPUs were asked for, or where nothing tells of which kind they are."""
    vendor = settings.vendor or driver()
    if settings.gpus <= 0 or vendor not in _VISIBLE:
        return
    try:
        there, how = nvidia() if vendor == "nvidia" else amd()
    except (OSError, subprocess.TimeoutExpired) as error:
        yield bad(f"cannot count its GPUs: {error}", _TODO)
        return
    if there < settings.gpus:
        yield bad(f"has {there} usable GPU(s), but the job asked for {settings.gpus} ({how})", _TODO)
        return
    for name in _VISIBLE[vendor]:
        allowed = visible(os.environ, name)
        if allowed is not None and allowed < settings.gpus:
            yield bad(
                f"{name}={os.environ[name]} leaves {allowed} GPU(s), but the job asked for {settings.gpus}",
                f"let Slurm set {name}: remove it from setup, environment and the shell's startup files",
            )


def driver(devices: Path = Path("/dev")) -> str:
    """nvidia or amd, whose driver has its device file; empty if neither has."""
    return next((name for name, file in _DRIVER.items() if (devices / file).exists()), "")


def nvidia(devices: Path = Path("/dev")) -> tuple[int, str]:
    """GPUs, or MIG devices where there are any, by nvidia-smi; without it, device files that can be opened.

    Raises OSError and TimeoutExpired.
    """
    try:
        done = subprocess.run(
            ["nvidia-smi", "-L"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE,
            check=False,
        )
    except FileNotFoundError:
        return _openable(devices, r"nvidia\d+"), "device files /dev/nvidiaN"
    listed = done.stdout.splitlines()
    parts = [line for line in listed if re.match(r"\s+MIG .*UUID", line)]
    whole = [line for line in listed if re.match(r"GPU \d+: .*UUID", line)]
    count = len(parts or whole)
    # What it says where it lists none, or where a GPU has fallen off the bus
    other = [line for line in (*listed, *done.stderr.splitlines()) if line.strip() and line not in (*parts, *whole)]
    return count, f"nvidia-smi -L: {other[0].strip()}" if other else "nvidia-smi -L"


def amd(devices: Path = Path("/dev")) -> tuple[int, str]:
    """Render nodes that can be opened, beside the compute driver's own file. Raises OSError."""
    if not (devices / "kfd").exists():
        return 0, f"{devices / 'kfd'} does not exist"
    return _openable(devices / "dri", r"renderD\d+"), "device files /dev/dri/renderD*"


def visible(environ: Mapping[str, str], name: str) -> int | None:
    """Return how many devices the variable leaves; None if it is not set."""
    text = environ.get(name)
    return None if text is None else len([item for item in text.split(",") if item.strip() not in ("", "-1")])


def _openable(folder: Path, pattern: str) -> int:
    """A container shows the device files of all GPUs; those that Slurm gave to others cannot be opened."""
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return 0
    count = 0
    for name in names:
        if re.fullmatch(pattern, name):
            try:
                os.close(os.open(folder / name, os.O_RDWR | os.O_CLOEXEC))
                count += 1
            except OSError:
                pass
    return count
