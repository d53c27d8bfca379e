"""What `slurmddp init` finds in a folder: training scripts, images, Python environments with torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from slurmddp.images.base import is_sif
from slurmddp.launch.python_environment import Environment, environments_here

#: Python files that are read, and bytes of each: a folder may be a home.
_FILES, _BYTES = 300, 256 * 1024
_NOT_TRAINING = re.compile(r"test_.*|.*_test|conftest|setup|__init__|.*config.*")
_LIBRARY = re.compile(
    r"^\s*(?:import|from)\s+(?:torch|lightning|pytorch_lightning|accelerate|transformers)\b", re.MULTILINE
)
#: What a script has that trains, and a module of it may lack.
_TRAINS = (
    re.compile(r"\.backward\(|\bTrainer\(|\.fit\("),
    re.compile(
        r"init_process_group|DistributedDataParallel|fully_shard|FullyShardedDataParallel|Accelerator\(|Fabric\("
    ),
    re.compile(r"__name__\s*==\s*['\"]__main__['\"]"),
)


def training_scripts(folder: Path) -> list[str]:
    """Return the scripts in this folder and those in it that train with torch, relative, the likeliest first."""
    scores = {path: _score(folder / path) for path in _python_files(folder)}
    found = [path for path, score in scores.items() if score > 1]
    return sorted(found, key=lambda path: (-scores[path], "train" not in Path(path).stem, path.count(os.sep), path))


def _python_files(folder: Path) -> Iterator[str]:
    seen = 0
    for pattern in ("*.py", "[!.]*/*.py"):
        for path in sorted(folder.glob(pattern)):
            if seen == _FILES:
                return
            if not _NOT_TRAINING.fullmatch(path.stem) and path.parent.name not in ("tests", "test"):
                seen += 1
                yield str(path.relative_to(folder))


def _score(path: Path) -> int:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            text = file.read(_BYTES)
    except OSError:
        return 0
    return sum(bool(pattern.search(text)) for pattern in (_LIBRARY, *_TRAINS)) if _LIBRARY.search(text) else 0


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
