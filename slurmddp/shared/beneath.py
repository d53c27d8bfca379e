"""Opens what lies below a folder that another user may have filled: no link, pipe or device there leads elsewhere."""

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from slurmddp.records.owners import written_by_others

#: A descriptor of a folder that is only passed through needs no right to list it.
_PASS = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def open_folder(path: Path) -> int:
    """Return a descriptor of a folder. The caller closes it. Raises OSError."""
    return os.open(path, _LIST)


@contextmanager
def entered(folder: int, parts: Sequence[str], *, acts: bool = False, listed: bool = False) -> Iterator[int]:
    """Enter a folder below another one, and give its descriptor.

    A link on the way is followed only if it and the folder that it leads to belong to this user, and if nobody else may
    write there. acts: something will be changed there, so no link is followed, and each folder must be this user's.
    listed: the folder will be listed. Raises OSError.
    """
    at = os.dup(folder)
    try:
        for index, part in enumerate(parts):
            flags = _LIST if listed and index == len(parts) - 1 else _PASS
            below = _enter(at, part, flags, acts=acts)
            os.close(at)
            at = below
            if acts and os.fstat(at).st_uid != os.geteuid():
                raise PermissionError(errno.EPERM, "it belongs to another user", "/".join(parts[: index + 1]))
        yield at
    finally:
        os.close(at)


def open_below(folder: int, parts: Sequence[str]) -> BufferedReader:
    """Open for reading what must be a regular file, by its names below a folder.

    Links are followed as by `entered`, but never one in the place of the file itself. Raises OSError.
    """
    with entered(folder, parts[:-1]) as parent:
        try:
            descriptor = os.open(parts[-1], os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EMLINK):  # EMLINK: FreeBSD's word for it
                raise OSError(errno.ELOOP, "it is a link, which slurmddp does not follow", parts[-1]) from None
            raise
    return regular(descriptor, parts[-1])


def check_folder(path: Path, below: Path) -> None:
    """Raise OSError if a folder below another one is missing, or behind a link that `entered` does not follow."""
    folder = open_folder(below)
    try:
        with entered(folder, parts_below(path, below)):
            pass
    finally:
        os.close(folder)


def regular(descriptor: int, name: str) -> BufferedReader:
    """Return the file of a descriptor, for reading. Raises OSError as `require_regular` does."""
    require_regular(descriptor, name)
    return open(descriptor, "rb")


def require_regular(descriptor: int, name: str) -> None:
    """Close the descriptor of a pipe, device or folder, and raise OSError."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", name)


def remove_tree(folder: int, name: str) -> None:
    """Remove a folder and all that lies in it, by its name in another one. No link is followed. Raises OSError."""
    descriptor = os.open(name, _LIST | os.O_NOFOLLOW, dir_fd=folder)
    try:
        clear(descriptor)
    finally:
        os.close(descriptor)
    os.rmdir(name, dir_fd=folder)


def clear(folder: int, keep: str = "") -> None:
    """Remove all that lies in a folder but the file `keep`. No link is followed. Raises OSError."""
    with os.scandir(folder) as entries:
        items = [(item.name, item.is_dir(follow_symlinks=False)) for item in entries if item.name != keep]
    for item, is_folder in items:
        if is_folder:
            remove_tree(folder, item)
        else:
            os.unlink(item, dir_fd=folder)


def parts_below(path: Path, folder: Path) -> tuple[str, ...]:
    """Return the names that lead from a folder to a path below it. Raises ValueError if it is not below."""
    parts = path.relative_to(folder).parts
    if not parts or ".." in parts:
        raise ValueError(f"{path} is not below {folder}")
    return parts


def _enter(at: int, part: str, flags: int, *, acts: bool) -> int:
    try:
        return os.open(part, flags | os.O_NOFOLLOW, dir_fd=at)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR, errno.EMLINK):
            raise
        link = os.stat(part, dir_fd=at, follow_symlinks=False)
        if not stat.S_ISLNK(link.st_mode):
            raise
        if acts:
            raise OSError(errno.ELOOP, "it is a link, and slurmddp changes nothing behind one", part) from None
        if link.st_uid != os.geteuid():
            raise OSError(errno.ELOOP, "it is a link of another user", part) from None
    below = os.open(part, flags, dir_fd=at)
    facts = os.fstat(below)
    if facts.st_uid != os.geteuid() or written_by_others(facts):
        os.close(below)
        raise OSError(errno.ELOOP, "it is a link to a folder that others can change", part)
    return below
