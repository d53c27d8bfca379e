"""What `slurmddp init` finds in a folder: training scripts, images, Python environments with torch."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from slurmddp.images.sif import is_sif
from slurmddp.launch.python_environment import Environment, environments_here
from slurmddp.program.facts import Answer
from slurmddp.program.read import is_training_program

#: Python files that are read: a folder may be a home.
_FILES, _SECONDS = 300, 20.0
_NOT_TRAINING = re.compile(r"test_.*|.*_test|conftest|setup|__init__|.*config.*")


def training_scripts(folder: Path) -> list[str]:
    """Return the scripts in this folder and those in it that train, relative, the likeliest first.

    Without any that surely does, those that perhaps do.
    """
    until = time.monotonic() + _SECONDS
    found: dict[Answer, list[str]] = {answer: [] for answer in Answer}
    for path in _python_files(folder):
        if time.monotonic() < until:
            found[is_training_program(str(folder / path), [str(folder)])].append(path)
    scripts = found[Answer.YES] or found[Answer.UNKNOWN]
    return sorted(scripts, key=lambda path: ("train" not in Path(path).stem, path.count(os.sep), path))


def _python_files(folder: Path) -> Iterator[str]:
    files = sorted(path for pattern in ("*.py", "[!.]*/*.py") for path in folder.glob(pattern))
    named = [
        each for each in files if not _NOT_TRAINING.fullmatch(each.stem) and each.parent.name not in ("tests", "test")
    ]
    return (str(path.relative_to(folder)) for path in named[:_FILES])


def images(folder: Path) -> list[str]:
    """Return the SIF images in this folder and in images/, relative, the newest first."""
    found: list[tuple[float, str]] = []
    for path in (*folder.glob("*.sif"), *folder.glob("images/*.sif")):
        try:
            if is_sif(path):
                found.append((path.stat().st_mtime, str(path.relative_to(folder))))
        except OSError:
            continue  # nobody can use it
    return [name for _, name in sorted(found, reverse=True)]


def environments(folder: Path, environment: Mapping[str, str]) -> list[Environment]:
    """Return the environments with torch: the active ones, then .venv and venv of this folder (uv makes the first)."""
    return environments_here([folder / ".venv", folder / "venv"], environment)
