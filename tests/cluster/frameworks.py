"""Training frameworks on the test cluster: their packages, for the image's Python, and a program that slows scripts."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from . import debian, roots
from .build import cache_folder, locked
from .cluster import Cluster
from .host import LOGIN

HOME = "/home/alice/frameworks"
SCRIPTS = f"{HOME}/scripts"
BREAK_SAVE = "break-save"
#: Packages whose releases have no wheel. pip builds them here: the image has no compiler.
WITHOUT_WHEEL = {"deepspeed": {"DS_BUILD_OPS": "0"}, "antlr4-python3-runtime==4.9.3": {}}
#: Starts SCRIPT with its arguments. Each optimizer step takes a while, so that there is time to break something, and
#: rank 0 notes the step that AdamW's state has, behind the number of the start. If the run folder has a file
#: BREAK_SAVE, rank 0 dies in its next torch.save, and leaves half a file.
SLOWLY = f"""\
import os, runpy, signal, sys, time
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

start = os.environ["SLURMDDP_ATTEMPT"] + "." + os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
steps = open(os.environ["SLURMDDP_RUN"] + "/steps", "a", buffering=1) if os.environ["RANK"] == "0" else None

def after(optimizer, *_):
    if steps:
        print(start, int(max(state["step"] for state in optimizer.state.values())), file=steps)
    time.sleep(0.1)

def break_save(data, file, *arguments, **options):
    torch_save(data, file, *arguments, **options)
    if steps and os.path.exists(order):
        os.unlink(order)
        if isinstance(file, (str, os.PathLike)):
            os.truncate(file, os.path.getsize(file) // 2)
        os.kill(os.getpid(), signal.SIGKILL)

order = os.environ["SLURMDDP_RUN"] + "/{BREAK_SAVE}"
torch_save, torch.save = torch.save, break_save
register_optimizer_step_post_hook(after)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@dataclass(frozen=True)
class Environment:
    """A venv of alice's over the packages of the torch image: its folder, and the versions in it by package.

    For a script that needs torch alone, the folder is empty: the image has it.
    """

    folder: str
    versions: dict[str, str]

    @property
    def options(self) -> list[str]:
        """The options of `submit` for it."""
        if not self.folder:
            return []
        return ["--set", f"container.python={self.folder}/bin/python", "--set", f"container.binds=[{self.folder}]"]


def make_environment(cluster: Cluster, image: str, packages: Sequence[str]) -> Environment:
    """Make it with the newest versions of these packages; skips the test where pip cannot get them."""
    if set(packages) == {"torch"}:
        return Environment("", _versions(cluster, ["apptainer", "exec", image, "python3"], packages))
    folder = f"{HOME}/{packages[0]}"
    cluster.sh(LOGIN, f"rm -rf {folder}; mkdir -p {folder}/wheels")
    for wheel in _wheels(packages):
        if not wheel.name.startswith("torch-"):  # the image has it
            shutil.copy(wheel, cluster.machine_path(f"{folder}/wheels"))
    install = (
        f"python3 -m venv --system-site-packages {folder} && {folder}/bin/pip install -q --no-index"
        f" --find-links {folder}/wheels {' '.join(packages)} && rm -r {folder}/wheels"
    )
    inside = ["apptainer", "exec", "--bind", folder, image]
    cluster.run(LOGIN, [*inside, "sh", "-c", install], timeout=900)
    return Environment(folder, _versions(cluster, [*inside, f"{folder}/bin/python"], packages))


def _versions(cluster: Cluster, python: Sequence[str], packages: Sequence[str]) -> dict[str, str]:
    """The versions of these packages that this Python has."""
    tell = "import sys, importlib.metadata as m; print(*map(m.version, sys.argv[1:]))"
    names = [re.split(r"[\[=<>~!]", package)[0] for package in packages]  # without extras and versions
    told = cluster.run(LOGIN, [*python, "-c", tell, *names]).stdout.split()
    return dict(zip(packages, told, strict=True))


def _wheels(packages: Sequence[str]) -> list[Path]:
    """The wheels of these packages and of what they need, downloaded or built once."""
    wanted = (roots.IMAGE_REQUIREMENTS[0], *packages)
    name = hashlib.sha256(repr((wanted, roots.LOCK.read_text())).encode()).hexdigest()[:12]
    wheels = cache_folder() / f"frameworks-{name}"
    with locked(wheels.with_suffix(".lock")):
        if not wheels.is_dir():
            download, built = wheels.with_suffix(".new"), wheels.with_suffix(".built")
            for folder in (download, built):
                shutil.rmtree(folder, ignore_errors=True)
            wanted = tuple(_build(name, built) if name in WITHOUT_WHEEL else name for name in wanted)
            if failure := roots.finish(roots.start_wheel_download(download, wanted, roots.IMAGE_PYTHON)):
                pytest.skip(f"pip cannot download {' '.join(packages)}: {failure}")
            download.rename(wheels)
    return sorted(wheels.iterdir())


def _build(package: str, folder: Path) -> str:
    """Build the wheel of its newest release; return the path."""
    pip = [
        roots.python_with_pip(),
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-binary",
        package,
        "--wheel-dir",
        folder,
    ]
    pip += [*shlex.split(os.environ.get(roots.PIP_ARGUMENTS_VARIABLE, "")), package]
    done = subprocess.run(pip, env={**os.environ, **WITHOUT_WHEEL[package]}, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"pip cannot build {package}: {debian.tail(done.stderr)}")
    return str(next(folder.glob(f"{package.partition('==')[0].replace('-', '_')}-*.whl")))
