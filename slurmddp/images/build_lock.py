"""One build of an image at a time, on however many nodes that share its folder."""

import contextlib
import errno
import fcntl
import os
import platform
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from slurmddp.errors import ExternalError, UserError
from slurmddp.images.provenance import other_owner, writing
from slurmddp.records.build import Build, read

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
#: Bytes of a lock file that are read.
_BYTES = 1000
_WAIT = "wait for it, or choose another file"
_ASK = "ask them to remove it, or choose another file"


@contextlib.contextmanager
def only_build(target: Path, report: Callable[[str], None]) -> Iterator[int]:
    """Hold `.NAME.building` beside the target while it is built; yield its descriptor, for the builder.

    The lock is released when all processes that have the descriptor are gone. Raises UserError where another build of
    this image is running, and says where.
    """
    path = _place(target)
    descriptor = _held(path, report)
    try:
        yield descriptor
    finally:
        # Removed while it is held: whoever has opened it meanwhile finds another file in its place.
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(descriptor)


class Holder(NamedTuple):
    """A build that is running, or may be. who: what its lock file says of it; todo: for the user who wants another."""

    who: str
    todo: str


def is_held(target: Path) -> bool:
    """Return whether this user is building this image, here or, where the file system's locks reach, elsewhere.

    A lock file of another user is none of these builds': `only_build` does not take it.
    Raises UserError where something else is in its lock's place.
    """
    return other_owner(_place(target)) is None and holder(target) is not None


def holder(target: Path) -> Holder | None:
    """Return who builds this image. None where nobody does.

    Where the file system has no locks, a lock file counts unless the build that left it is known to be over.
    Raises UserError where something else is in the lock's place.
    """
    path = _place(target)
    if (other := other_owner(path)) is not None:
        return Holder(f"{other}, who also may have left {path} behind", _ASK)
    try:
        descriptor = _open(path, os.O_RDWR)
    except FileNotFoundError:
        return None
    except OSError as error:
        return Holder(f"nobody knows whom: {path} cannot be opened ({error.strerror})", _WAIT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        build = read(os.read(descriptor, _BYTES))
        if error.errno not in _NO_LOCKS:
            return Holder(_who(build), _WAIT)
        if build is not None and _is_over(build):
            return None
        return Holder(_who(build), f"this file system has no locks: if that build is no longer running, remove {path}")
    finally:
        os.close(descriptor)
    return None


def _who(build: Build | None) -> str:
    if build is None:
        return "another process"
    if build.node == platform.node() and not _runs(build.pid):
        return f"{build.line()}: that process was killed, but the builder that it started is still running"
    return build.line()


def _is_over(build: Build) -> bool:
    """Return whether the build that wrote this into its lock file is over: its process or its job is gone."""
    if build.node == platform.node() and not _runs(build.pid):
        return True
    if build.job is None or shutil.which("scontrol") is None:
        return False
    from slurmddp.cluster.base import JobId
    from slurmddp.cluster.client import Slurm

    try:
        view = Slurm().job(JobId(build.job))
    except (ExternalError, UserError):
        return False  # Slurm does not answer: nobody knows
    return view is None or view.state.over


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # another user's
    return True


def _place(target: Path) -> Path:
    return target.with_name(f".{target.name}.building")


def _open(path: Path, flags: int) -> int:
    """Open the lock file, which is written to: never where a link, a pipe or another name of a file leads.

    Raises OSError, and UserError where it is such a thing: in a folder that others can write to, it is their trap.
    """
    trap = UserError(
        f"{path} is a link or a pipe, not a lock file of a build", todo="find out where it comes from, and remove it"
    )
    try:
        # O_NONBLOCK: the opening of a pipe does not wait
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise trap from None
        raise
    state = os.fstat(descriptor)
    if not stat.S_ISREG(state.st_mode) or state.st_nlink > 1:
        os.close(descriptor)
        raise trap
    return descriptor


def _held(path: Path, report: Callable[[str], None]) -> int:
    if (other := other_owner(path)) is not None:
        raise UserError(f"this image is being built by {other}, who also may have left {path} behind", todo=_ASK)
    while True:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = _open(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = _who(read(os.read(descriptor, _BYTES)))
            os.close(descriptor)
            raise UserError(f"this image is already being built by {who}", todo=_WAIT) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(descriptor)
                raise UserError(f"{path} cannot be locked: {error.strerror}") from None
            report("note: this file system has no locks, so do not start a second build of this image")
        if _is_at(descriptor, path):
            job = os.environ.get("SLURM_JOB_ID", "")
            build = Build(os.getpid(), platform.node(), time.time(), job if job.isdecimal() else None)
            with contextlib.suppress(OSError):  # a full disk: the lock is held all the same
                os.ftruncate(descriptor, 0)
                os.write(descriptor, build.write())
            return descriptor
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether the path still leads to the open file."""
    mine = os.fstat(descriptor)
    try:
        there = path.lstat()
    except FileNotFoundError:
        return False
    return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)
