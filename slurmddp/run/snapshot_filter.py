"""What lies in a project and is no code: images of containers, run folders, caches, and what .slurmddpignore names (the
syntax of .gitignore, without git). For credentials: credentials.py."""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from slurmddp.errors import UserError
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


NAME = ".slurmddpignore"


@dataclass(frozen=True)
class ProjectIgnore:
    """patterns: (is it an exception, expression of a path relative to the project), in the file's order."""

    patterns: tuple[tuple[bool, re.Pattern[str]], ...] = ()

    def ignored(self, relative: str) -> bool:
        """Return whether the last pattern that matches this path, or a folder above it, leaves it out."""
        parts = relative.split("/")
        above = ["/".join(parts[: count + 1]) for count in range(len(parts))]
        # As in git: below a folder that is left out, no exception counts
        return bool(self.patterns) and any(map(self._left_out, above))

    def _left_out(self, path: str) -> bool:
        decided = [exception for exception, pattern in self.patterns if pattern.fullmatch(path)]
        return bool(decided) and not decided[-1]


def read_ignore(project: Path) -> ProjectIgnore:
    """Read the project's .slurmddpignore. Raises UserError for a pattern that is broken, or an unreadable file."""
    file = project / NAME
    try:
        text = file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        return ProjectIgnore()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read: {error}", todo="correct it, or remove it") from None
    patterns = []
    for number, line in enumerate(text.splitlines(), 1):
        pattern = re.sub(r"(?<!\\)[ \t]+$", "", line)
        if not pattern or pattern.startswith("#"):
            continue
        try:
            patterns.append((pattern.startswith("!"), _expression(pattern.removeprefix("!"))))
        except (ValueError, re.error):
            todo = "see gitignore(5)"
            raise UserError(f"the pattern {line[:80]!r} is broken", where=f"{file}:{number}", todo=todo) from None
    return ProjectIgnore(tuple(patterns))


def _expression(pattern: str) -> re.Pattern[str]:
    """Without a slash before its end, a pattern of .gitignore holds in every folder. Raises ValueError."""
    from slurmddp.images.context.ignore import expression  # here: few projects have such a file

    anywhere = "/" not in pattern.rstrip("/")
    parts = [part for part in pattern.split("/") if part]
    if not parts:
        raise ValueError(pattern)
    # `**` beside other characters is `*`; a negated class begins with !, which Go writes as ^
    parts = [part if part == "**" else re.sub(r"\*\*+", "*", part).replace("[!", "[^") for part in parts]
    return expression("/".join(["**", *parts] if anywhere else parts))
