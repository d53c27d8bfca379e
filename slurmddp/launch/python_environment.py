"""Virtual and conda environments in the place of an image: what `--venv` and `--conda` set, and the active one."""

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from slurmddp.errors import UserError
from slurmddp.job.document import Key
from slurmddp.job.plan.model import Note
from slurmddp.job.resolve import Resolved

#: The layer of what the shell that submits has activated.
_LAYER = "active environment"
#: Seconds for the start of an environment's Python, on a slow shared disk.
_PATIENCE = 30
_NO_IMAGE = ("container", "runtime"), "none"


class Environment(NamedTuple):
    """kind: of messages; lines: the setup lines that activate it on a node; source: where it was found."""

    kind: str
    folder: Path
    lines: tuple[str, ...]
    source: str


def venv_options(folder: str) -> list[tuple[str, Any, str]]:
    """Return what `--venv DIR` sets. Raises UserError if it is none."""
    return _options(_venv(Path(folder).absolute(), "--venv"))


def conda_options(name: str, environment: Mapping[str, str]) -> list[tuple[str, Any, str]]:
    """Return what `--conda NAME` (or its folder) sets. Raises UserError if this machine has no conda."""
    return _options(_conda(name, environment, "--conda"))


def _options(active: Environment) -> list[tuple[str, Any, str]]:
    return [(".".join(_NO_IMAGE[0]), _NO_IMAGE[1], active.source), ("setup", list(active.lines), active.source)]


def _venv(folder: Path, source: str) -> Environment:
    activate = folder / "bin" / "activate"
    if not activate.is_file():
        todo = f"python3 -m venv {shlex.quote(str(folder))}, then pip install torch there"
        raise UserError(f"{folder} is no virtual environment: it has no bin/activate", where=source, todo=todo)
    return Environment("virtual environment", folder, (f"source {shlex.quote(str(activate))}",), source)


def _conda(name: str, environment: Mapping[str, str], source: str) -> Environment:
    """conda itself is named by its folder: the nodes' PATH may lack it."""
    program = environment.get("CONDA_EXE") or shutil.which("conda", path=environment.get("PATH"))
    script = Path(program or "").parent.parent / "etc" / "profile.d" / "conda.sh"
    if not program or not script.is_file():
        todo = "load it first (module load), or write the lines that activate it into the job file: setup: [...]"
        raise UserError(
            "conda is not on this machine" if not program else f"conda has no {script}", where=source, todo=todo
        )
    folder = Path(name).absolute() if os.sep in name else None
    return Environment(
        "conda environment",
        folder or Path(name),
        (f"source {shlex.quote(str(script))}", f"conda activate {shlex.quote(str(folder or name))}"),
        source,
    )


def with_active(resolved: Resolved, environment: Mapping[str, str]) -> tuple[Resolved, list[Note]]:
    """Return the job with the environment that is active here, if nothing says what its ranks run in.

    That is one that the shell has activated, and only if it has torch.
    """
    container = resolved.job.container
    by_user = resolved.layered.origins.get(("container", "runtime"))
    named = container.image or container.recipe or container.base or (by_user and not by_user.layer.startswith("site "))
    if named or not container.needs_image or not resolved.site.queues:
        return resolved, []
    without: list[str] = []
    for active in _active(environment):
        if not _has_torch(active.folder):
            without.append(f"the {active.kind} {active.folder} ({active.source}) has no torch")
            continue
        note = f"no image is named: the ranks use the {active.kind} {active.folder} ({active.source}); --image, --venv "
        values: dict[Key, Any] = {_NO_IMAGE[0]: _NO_IMAGE[1], ("setup",): (*resolved.job.setup, *active.lines)}
        return resolved.laid(values, _LAYER, active.source), [Note("note", f"{note}or --conda names another")]
    return resolved, [Note("note", text) for text in without]


def environments_here(folders: Sequence[Path], environment: Mapping[str, str]) -> list[Environment]:
    """Return the active environments, then those in these folders, each once and only if it has torch."""
    inactive = [_venv(folder.absolute(), str(folder)) for folder in folders if (folder / "bin/activate").is_file()]
    unique: dict[str, Environment] = {}
    for each in [*_active(environment), *inactive]:
        unique.setdefault(os.path.realpath(each.folder), each)
    return [each for each in unique.values() if _has_torch(each.folder)]


def _active(environment: Mapping[str, str]) -> list[Environment]:
    environments: list[Environment] = []
    for variable, make in (("VIRTUAL_ENV", _venv), ("CONDA_PREFIX", None)):
        folder = environment.get(variable)
        if not folder:
            continue
        try:
            environments.append(make(Path(folder), variable) if make else _conda(folder, environment, variable))
        except UserError:
            continue  # a variable that an older shell has left
    return environments


def _has_torch(folder: Path) -> bool:
    """Return whether its Python finds torch; False also for one that does not start."""
    question = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    command = [str(folder / "bin" / "python"), "-Ic", question]
    try:
        return subprocess.run(command, capture_output=True, timeout=_PATIENCE, check=False).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False
