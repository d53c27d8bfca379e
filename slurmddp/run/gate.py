"""The gate to run folders: what writes, removes, sends, signals or executes needs a folder of this user, held open.

`RunFolder` reads any run, also a colleague's. `OwnRun` exists for the user's own runs only, so a function that takes
one cannot be called with a run that nobody has checked.
"""

import contextlib
import errno
import json
import os
import pwd
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurmddp.errors import UserError
from slurmddp.records.events import Event, Facts
from slurmddp.records.owners import written_by_others
from slurmddp.run.events import append_line
from slurmddp.run.layout import RunFolder
from slurmddp.shared import beneath
from slurmddp.shared.files import write_whole


class Held:
    """A folder of this user, opened once. All that is done in it is done by its descriptor, and behind no link."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)

    @contextlib.contextmanager
    def inside(self, folder: Path, *, listed: bool = False) -> Iterator[int]:
        """Enter this folder, or one below it, to change something there. Raises OSError."""
        parts = (".",) if folder == self.path else beneath.parts_below(folder, self.path)
        with beneath.entered(self.descriptor, parts, acts=True, listed=listed) as descriptor:
            yield descriptor

    def read(self, path: Path, limit: int) -> bytes:
        """Return at most the first `limit` bytes of a file of this user. Raises OSError."""
        with beneath.open_below(self.descriptor, beneath.parts_below(path, self.path)) as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                raise PermissionError(errno.EPERM, "it belongs to another user", str(path))
            return file.read(limit)

    def write(self, path: Path, text: str) -> None:
        """Write a file such that nobody ever sees half of it; a link of its name is replaced. Raises OSError."""
        with self.inside(path.parent) as folder:
            write_whole(path, text, folder)

    def write_new(self, path: Path, text: str) -> bool:
        """Make a file; return False where there is one. Raises OSError."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with self.inside(path.parent) as folder:
            try:
                descriptor = os.open(path.name, flags, 0o644, dir_fd=folder)
            except FileExistsError:
                return False
        with open(descriptor, "wb") as file:
            file.write(text.encode())
        return True

    def append_text(self, path: Path, text: str) -> None:
        """Append text to a file, which is made where there is none. Raises OSError."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with self.inside(path.parent) as folder:
            descriptor = os.open(path.name, flags, 0o644, dir_fd=folder)
        beneath.require_regular(descriptor, str(path))
        with open(descriptor, "ab") as file:
            file.write(text.encode())

    def make(self, folder: Path) -> None:
        """Make a folder where there is none. Raises OSError."""
        with self.inside(folder.parent) as parent, contextlib.suppress(FileExistsError):
            os.mkdir(folder.name, dir_fd=parent)

    def move(self, path: Path, target: Path) -> None:
        """Rename a file or folder to another name below this folder. Raises OSError."""
        with self.inside(path.parent) as source, self.inside(target.parent) as destination:
            os.rename(path.name, target.name, src_dir_fd=source, dst_dir_fd=destination)

    def remove(self, path: Path) -> None:
        """Remove a file, or nothing if it is gone. Raises OSError."""
        with self.inside(path.parent) as folder, contextlib.suppress(FileNotFoundError):
            os.unlink(path.name, dir_fd=folder)

    def clear(self, last: str) -> None:
        """Remove all that lies in this folder; the file `last` at the end. Raises OSError."""
        with self.inside(self.path, listed=True) as folder:
            beneath.clear(folder, keep=last)
            os.unlink(last, dir_fd=folder)

    def remove_tree(self, path: Path) -> None:
        """Remove a folder and all that lies in it, but nothing behind a link. Raises OSError."""
        with self.inside(path.parent) as folder:
            beneath.remove_tree(folder, path.name)


@dataclass(frozen=True)
class OwnRun(RunFolder):
    """A run of this user. Only `own` and `own_or_none` make one."""

    held: Held = field(compare=False, repr=False)

    def record(self, facts: Facts, job_id: str | None = None) -> None:
        """Append one event of now. job_id: the job's, if it has one. Raises OSError."""
        with self.held.inside(self.path) as inside:
            append_line(self.events, Event(facts, time.time(), job_id=job_id).write(), inside)

    def remove_all(self) -> None:
        """Remove the run folder, its manifest last: a removal that was cut off is found again. Raises OSError."""
        self.held.clear(last=self.manifest.name)
        self.path.rmdir()

    def write_json(self, path: Path, value: Any) -> None:
        self.held.write(path, json.dumps(value, indent=2) + "\n")


def own(folder: RunFolder, *, to: str, todo: str | None = None) -> OwnRun:
    """Return the run as one of this user. to: what it is needed for, as in "cancel it".

    Raises UserError if the run, or what it would execute, belongs to another user, or if others may write there.
    """
    if isinstance(folder, OwnRun):
        return folder
    held, problem = _hold(folder)
    if held is None or problem:
        raise UserError(f"run {folder.id} {problem}, so you cannot {to}", where=str(folder.path), todo=todo)
    return OwnRun(folder.path, held)


def own_or_none(folder: RunFolder) -> OwnRun | None:
    """Return the run as one of this user; None if `own` would refuse it."""
    try:
        return own(folder, to="")
    except UserError:
        return None


def stranger(folder: RunFolder) -> str | None:
    """Return why a run is not this user's own, as in "belongs to bob"; None if it is. A missing folder is nobody's."""
    return None if isinstance(folder, OwnRun) else _hold(folder)[1]


def hold(path: Path, name: str, *, todo: str) -> Held:
    """Return a folder that this user owns and nobody else may write to. Raises UserError, with the name in front."""
    try:
        descriptor = beneath.open_folder(path)
    except OSError as error:
        raise UserError(f"cannot be opened: {error.strerror}", where=str(path)) from None
    if problem := _problem(os.fstat(descriptor)):
        os.close(descriptor)
        raise UserError(f"{name} {problem}", where=str(path), todo=todo)
    return Held(path, descriptor)


def owner_name(uid: int) -> str:
    """Return the name of a user, or the number of one without a name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def _hold(folder: RunFolder) -> tuple[Held | None, str | None]:
    """Open a run folder, if that is allowed. Return it, and why it is not this user's own."""
    try:
        descriptor = beneath.open_folder(folder.path)
    except OSError as error:
        return None, f"cannot be opened: {error.strerror}"
    held, problem = Held(folder.path, descriptor), _problem(os.fstat(descriptor))
    for path in (
        folder.manifest,
        folder.job_yaml,
        folder.site_yaml,
        folder.code,
        folder.code_archive,
        folder.python_sh,
    ):
        name = str(path.relative_to(folder.path))
        for follow in (False, True):
            try:
                facts = os.stat(name, dir_fd=descriptor, follow_symlinks=follow)
            except OSError:  # Not there, or not to be read: then nothing of it is executed.
                continue
            if problem is None and facts.st_uid != os.geteuid():
                problem = f"has a file of {owner_name(facts.st_uid)} ({name})"
    return held, problem


def _problem(facts: os.stat_result) -> str | None:
    if facts.st_uid != os.geteuid():
        return f"belongs to {owner_name(facts.st_uid)}"
    return "can be changed by other users (chmod go-w)" if written_by_others(facts) else None
