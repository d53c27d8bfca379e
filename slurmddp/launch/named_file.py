"""The file or module that the command line names as the job: its name, what is wrong with it, and what was meant."""

import ast
import difflib
import os
import re
import shlex
from pathlib import Path
from typing import NamedTuple

from slurmddp.errors import UserError
from slurmddp.job.document import is_null
from slurmddp.job.plan.model import BASH_SUFFIX
from slurmddp.program.source import CannotReadError, parse

JOB_SUFFIXES = (".yaml", ".yml")
_PROGRAMS = (".py", BASH_SUFFIX)
#: What Slurm's users call a batch script.
BATCH_SUFFIXES = (".sbatch", ".slurm", ".job")


def wrong_file(name: str, *, resumes: bool = False) -> UserError | None:
    """Return why this is no job file and no script; None if it is one. resumes: beside --resume RUN."""
    path, quoted = Path(name), shlex.quote(name)
    if path.is_dir():
        return UserError("is a directory, not a job file", where=name, todo="give the YAML file in it")
    if not os.path.lexists(path) and (path.suffix in _PROGRAMS or near(path)):
        todo = near(path) or "correct its path"
        return UserError(f"the script {path.absolute()} does not exist", where=name, todo=todo)
    if path.suffix == ".ipynb":
        todo = f"jupyter nbconvert --to script {quoted}, then submit the script that it writes"
        return UserError("is a notebook, which cannot run as ranks", where=name, todo=todo)
    line = batch_line(path)
    if line is not None or (path.suffix in BATCH_SUFFIXES and path.is_file()):
        at = "" if line is None else f" (line {line})"
        todo = f"convert it to a job file: slurmddp import {quoted} -o job.yaml"
        return UserError(f"is a batch script{at}: slurmddp would run it on each rank", where=name, todo=todo)
    if path.suffix in _PROGRAMS:
        return None
    todo = "give one of the two; `slurmddp init JOB.yaml` writes a job file"
    if resumes:
        todo = "to pass it to the script of the resumed run: --resume RUN RUN_FOLDER/job.yaml -- ARGS"
    return UserError("is neither a job file (.yaml) nor a script (.py, .sh)", where=name, todo=todo)


def near(path: Path) -> str | None:
    """Return a question that names the most similar job file or script in the folder; None if none is similar."""
    try:
        names = [
            each for each in os.listdir(path.parent) if each.endswith((*JOB_SUFFIXES, *_PROGRAMS, *BATCH_SUFFIXES))
        ]
    except OSError:
        return None
    matches = difflib.get_close_matches(path.name, names, 1, 0.6)
    return f"did you mean {path.parent / matches[0]}?" if matches else None


def batch_line(script: Path) -> int | None:
    """Return the number of the first line that sbatch would read; None if there is none."""
    try:
        if not script.is_file():  # a pipe would wait for its writer
            return None
        with script.open(encoding="utf-8", errors="replace") as file:
            return next((number for number, line in enumerate(file, 1) if line.startswith("#SBATCH")), None)
    except OSError:
        return None


def module_file(folder: str, module: str) -> Path | None:
    """Return the file that `python -m MODULE` runs in a folder; None if there is none."""
    path = Path(folder, *module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__main__.py") if file.is_file()), None)


class OfPackage(NamedTuple):
    """A file that Python can only start as a module. line: its first relative import; folder: of the package."""

    line: int
    folder: Path
    module: str


def of_package(script: Path) -> OfPackage | None:
    """Return as what a file would start that dies as a script, in a relative import; None if it does not.

    Only imports that always run count: not those of a function, or below `if` or `try`.
    """
    try:
        body = parse(str(script))[0].body
    except CannotReadError:
        return None  # whatever is wrong with it, Python will say
    relative = [node for node in body if isinstance(node, ast.ImportFrom) and node.level]
    if not relative:
        return None
    folder = script.parent
    names = [script.stem]
    for _ in range(max(node.level for node in relative)):
        names.insert(0, folder.name)
        folder = folder.parent
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    return OfPackage(relative[0].lineno, folder, ".".join(names))


def program_name(script: Path) -> str:
    """Return the name of a script's runs: FOLDER-SCRIPT, because many projects have a train.py."""
    folder = script.absolute().parent
    of_folder = "" if str(folder) in ("/", os.path.expanduser("~")) else os.path.basename(os.path.normpath(folder))
    return job_name(Path(f"{of_folder[:50]}-{script.stem}.py" if of_folder not in ("", script.stem) else script))


def job_name(path: Path) -> str:
    name = re.sub(r"[^A-Za-z0-9._+-]+", "-", path.stem).strip("-._+")[:100]
    return "job" if is_null(name) else name
