"""Images in a folder, by what their locks say; which of them nobody needs any more."""

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slurmddp.errors import UserError
from slurmddp.images.driver import ImageCuda, of_release
from slurmddp.images.provenance import lock_path, read_lock
from slurmddp.images.releases import tag_of
from slurmddp.images.workspace import HELD, RECORD, recorded, remove_tree
from slurmddp.shared.beneath import open_folder

#: What a build writes beside an image.
_BESIDE = (".def", ".build.log", ".lock.json")
#: What a build that was killed leaves: .NAME.sif.0123abcd.part, a folder; .job: a batch job's log (--on-node).
_DRAFT = re.compile(r"\..+\.[0-9a-f]{8}\.(part|job)")
State = Literal["whole", "changed", "no lock", "unreadable"]


@dataclass(frozen=True)
class Shelved:
    """One image. state: whether its lock is that of this very file; lock: what it says, empty where it is not.

    unreadable: it is a link that leads nowhere, a pipe, a folder, or closed to this user.
    """

    path: Path
    bytes: int
    mtime: float
    state: State
    lock: Mapping[str, Any]

    @property
    def recipe(self) -> str:
        """The recipe's name, or empty."""
        return str(self.lock.get("recipe") or "")

    @property
    def cuda(self) -> ImageCuda:
        """Return what its base brings, by its registry's word or by NVIDIA's release."""
        reported = self.lock.get("registry") or {}
        tag = tag_of(str(self.lock.get("base") or "").removeprefix("docker://"))
        known = of_release(tag) if tag else ImageCuda(None, None, None)
        return ImageCuda(reported.get("cuda") or known.cuda, reported.get("driver") or known.driver, known.compat)


def shelved(path: Path) -> Shelved:
    """One image file. Raises UserError where there is none."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
    except OSError as error:
        todo = "`slurmddp image list` lists the images"
        raise UserError(f"cannot read the image {path}: {error.strerror}", todo=todo) from None
    lock = read_lock(path)
    state: State = "whole" if lock is not None else "changed" if lock_path(path).exists() else "no lock"
    return Shelved(path, status.st_size, status.st_mtime, state, lock or {})


def on_shelf(folder: Path) -> list[Shelved]:
    """The .sif files of a folder, newest first. Raises UserError where there is no such folder."""
    if not folder.is_dir():
        raise UserError(f"the folder {folder} does not exist", todo="give the folder with your images")
    return sorted(map(_shelved, folder.glob("*.sif")), key=lambda image: image.mtime, reverse=True)


def _shelved(path: Path) -> Shelved:
    try:
        return shelved(path)
    except UserError:
        return Shelved(path, 0, 0.0, "unreadable", {})


@contextlib.contextmanager
def held(folder: Path) -> Iterator[Path]:
    """Hold a folder open: the path that this yields leads to it, whatever another user puts in its place."""
    if not folder.is_dir():
        raise UserError(f"the folder {folder} does not exist", todo="give the folder with your images")
    descriptor = open_folder(folder)
    try:
        yield Path(f"/proc/{os.getpid()}/fd/{descriptor}")
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Removable:
    """What nobody needs, and why."""

    paths: tuple[Path, ...]
    bytes: int
    why: str


def removable(folder: Path, keep: int, used: Iterable[Path]) -> list[Removable]:
    """Images of a recipe beyond the newest `keep`, but none that is in `used`; and what killed builds have left.

    Only images of ours are named, whose locks are theirs: of the others nobody knows how to make them again.
    What another user owns is neither named nor counted, and links are not: other users may have made both.
    """
    needed = {path.resolve() for path in used}
    items: list[Removable] = []
    newer: dict[str, int] = {}
    for image in on_shelf(folder):
        if image.state != "whole" or not image.recipe or not _is_own(image.path):
            continue
        newer[image.recipe] = newer.get(image.recipe, 0) + 1
        if newer[image.recipe] > keep and image.path.resolve() not in needed:
            beside = (image.path.with_name(image.path.name + end) for end in _BESIDE)
            paths = tuple(path for path in (image.path, *beside) if _is_own(path))
            reason = f"{newer[image.recipe] - 1} newer of recipe {image.recipe}"
            items.append(Removable(paths, sum(path.stat().st_size for path in paths), reason))
    for path in sorted(folder.iterdir()):
        if _is_leftover(path):
            paths = _with_temporary(path)
            size = sum(file.lstat().st_size for one in paths for file in (one, *one.rglob("*")))
            reason = f"leftover of a killed build{''.join(f', with {folder}' for folder in paths[1:])}"
            items.append(Removable(paths, size, reason))
    return items


def _with_temporary(draft: Path) -> tuple[Path, ...]:
    """A draft, and the temporary folders of its build where they are on this machine."""
    folder = recorded(draft / RECORD)
    return (draft,) if folder is None else (draft, folder)


def remove(path: Path) -> None:
    """Remove a file or a build's folder; a link itself, not what it leads to. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        if not remove_tree(path):
            shutil.rmtree(path)  # says why
    else:
        path.unlink(missing_ok=True)


def left_over(image: Path) -> list[Path]:
    """Return what killed builds of this one image have left beside it; none while it is being built."""
    drafts = [path for path in image.parent.iterdir() if path.name.rsplit(".", 2)[0] == f".{image.name}"]
    return [one for path in drafts if _is_leftover(path) for one in _with_temporary(path)]


def _is_own(path: Path) -> bool:
    """Return whether a file or folder is this user's own. Links are nobody's."""
    try:
        facts = path.lstat()
    except OSError:
        return False
    return facts.st_uid == os.geteuid() and (stat.S_ISREG(facts.st_mode) or stat.S_ISDIR(facts.st_mode))


def _is_leftover(path: Path) -> bool:
    """Return whether a build of this user made this, and is over."""
    return _DRAFT.fullmatch(path.name) is not None and _is_own(path) and not _is_being_built(path)


def _is_being_built(draft: Path) -> bool:
    """Return whether the build that writes this may still be running: its draft or its image is locked."""
    from slurmddp.images.build_lock import is_held

    with contextlib.suppress(FileNotFoundError, NotADirectoryError), (draft / HELD).open("r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # no locks on this file system
            pass
    try:
        return is_held(draft.with_name(draft.name.rsplit(".", 2)[0].removeprefix(".")))
    except UserError:
        return True  # what is in the lock's place is for the user to look at
