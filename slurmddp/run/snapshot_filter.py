"""What lies in a project and is no code: images of containers, run folders, caches. For credentials: credentials.py."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from slurmddp.shared.files import read_json

SKIPPED_FOLDERS = frozenset({".git", "__pycache__", ".venv", "venv", "node_modules", ".cache"})
SKIPPED_SUFFIXES = (".pyc", ".pyo")
_IMAGES = (".sif", ".sif.def", ".sif.build.log", ".sif.lock.json", ".sqsh", ".simg")
_PART = re.compile(r"\.[A-Za-z0-9][A-Za-z0-9._+-]*-\d{8}-\d{6}-[a-z0-9]{4}\.part")  # see create.Draft


def is_image(name: str) -> bool:
    """Return whether a file of this name is a container's image, or what we write beside one."""
    return name.lower().endswith(_IMAGES)


def is_run_folder(path: Path) -> bool:
    """Return whether this is a run folder of ours: whole (a manifest that says so, and what a job has), half made, or
    rendered by `slurmddp check --write`.
    """
    if _PART.fullmatch(path.name) or all(os.path.lexists(path / name) for name in ("rendezvous.key", "job.sh")):
        return True
    try:
        manifest = read_json(path / "manifest.json")
    except (OSError, ValueError):
        return False  # none, unreadable or somebody else's: then it is a folder like any other
    ours = isinstance(manifest, dict) and "run" in manifest and "slurmddp" in manifest
    return ours and any(os.path.lexists(path / name) for name in ("submission.json", "job.sh", "job.json"))


def below(root: Path, folders: Iterable[Path]) -> tuple[frozenset[str], frozenset[Path]]:
    """Return the folders below the root, as paths relative to it, and the real path of each.

    The root and its parents are not below it: leaving them out would leave nothing of the project.
    """
    real_root = Path(os.path.realpath(root))
    relative, real = set(), set()
    for folder in folders:
        target = Path(os.path.realpath(folder))
        if not real_root.is_relative_to(target):
            real.add(target)
        for path, base in ((Path(os.path.abspath(folder)), root), (target, real_root)):
            if path != base and path.is_relative_to(base):
                relative.add(path.relative_to(base).as_posix())
    return frozenset(relative), frozenset(real)
