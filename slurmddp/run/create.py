"""Makes run folders: built beside their place and renamed into it, so that a failure leaves nothing."""

from __future__ import annotations

import errno
import os
import random
import re
import secrets
import stat
import string
import subprocess
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from types import TracebackType

from slurmddp.errors import UserError
from slurmddp.records.owners import renamed_by_others
from slurmddp.run import git
from slurmddp.run.layout import RunFolder

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")
_TRIES = 100
#: Bits of a mode: group and others may write.
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
#: A key pair with which the nodes of a run know each other: a key on P-256, and a certificate signed with it.
_PAIR = (
    *("openssl", "req", "-x509", "-nodes", "-days", "3650", "-subj", "/CN=slurmddp", "-keyout", "-", "-out", "-"),
    *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-pkeyopt", "ec_param_enc:named_curve"),
)
_TODO = "choose another runs folder: --set paths.runs=FOLDER"


def new_id(name: str, now: datetime | None = None) -> str:
    """Return `<name>-<YYYYMMDD-HHMMSS>-<4 of a-z0-9>`, local time.

    Raises UserError for a name that makes no folder name.
    """
    if not _NAME.fullmatch(name):
        todo = "use at most 100 letters, digits and . _ + -, and begin with a letter or digit"
        raise UserError(f"{name!r} cannot be the name of a run", todo=todo)
    moment = (now or datetime.now()).strftime("%Y%m%d-%H%M%S")
    # SystemRandom: runs of the same second differ even if a program has seeded `random`.
    suffix = "".join(random.SystemRandom().choices(string.ascii_lowercase + string.digits, k=4))
    return f"{name}-{moment}-{suffix}"


class Draft:
    """A run folder in the making; a context manager that leaves nothing behind unless `commit` was called.

    final:  where it will be (for texts that name the run folder).
    folder: where it is now, a sibling of that: write there.

    mode: of the run folder, who may look into it at all. Nobody else can write what lies in it, whatever the umask:
    whoever replaces a script runs code as the owner. The umask, the setgid bit and default ACLs decide the rest.
    """

    def __init__(self, root: Path, name: str, *, now: datetime | None = None, mode: int = 0o700) -> None:
        root = Path(os.path.abspath(root))
        self._made: list[Path] = []
        self._done = False
        self._mode = mode
        new_id(name, now)  # a bad name is refused before anything is made
        try:
            self._make_root(root)
            self.final, self.folder = _reserve(root, name, now)
        except OSError as error:
            self._remove_roots()
            raise folder_error(error, root) from error

    def write(self, files: Mapping[str, str]) -> None:
        """Write texts by path relative to the folder; *.sh are executable.

        Raises UserError (no space, ...).
        """
        for relative, text in files.items():
            target = self.folder.path / relative
            if Path(relative).is_absolute() or ".." in Path(relative).parts:
                raise ValueError(f"{relative!r} is not inside the run folder")
            try:
                make_folder(target.parent)
                write_file(target, text.encode("utf-8"), mode=0o755 if target.suffix == ".sh" else 0o644)
            except OSError as error:
                raise folder_error(error, self.final.path) from error

    def commit(self) -> RunFolder:
        """Put the folder in its place. Raises UserError."""
        try:
            # A setgid bit is the parent's doing, and stays. The mode is also the mask of a default ACL.
            setgid = self.folder.path.stat().st_mode & stat.S_ISGID
            self.folder.path.chmod(self._mode | setgid)
            root = self.final.path.parent
            if root in self._made and git.in_work_tree(root) and not os.path.lexists(root / ".gitignore"):
                write_file(root / ".gitignore", b"*\n")
            # Nobody else makes this folder: whoever does must own the temporary one first.
            self.folder.path.rename(self.final.path)
        except OSError as error:
            raise folder_error(error, self.final.path) from error
        self._done = True
        return self.final

    def __enter__(self) -> Draft:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._done:
            return
        import shutil  # here: only a failure needs it

        shutil.rmtree(self.folder.path, ignore_errors=True)  # what cannot be removed must not hide the first error
        self._remove_roots()

    def _make_root(self, root: Path) -> None:
        missing = []
        path = root
        while not os.path.lexists(path):
            missing.append(path)
            path = path.parent
        for folder in reversed(missing):
            try:
                folder.mkdir(0o755)
                folder.chmod(folder.stat().st_mode | stat.S_IRWXU)  # whatever the umask
            except FileExistsError:
                continue  # another submission was faster
            self._made.append(folder)
        if not root.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(root))

    def _remove_roots(self) -> None:
        for folder in reversed(self._made):
            try:
                folder.rmdir()
            except OSError:
                return  # another run is in it by now: it stays, and so do its parents


def create(
    root: Path,
    name: str,
    files: Mapping[str, str],
    *,
    fill: Callable[[Draft], None] | None = None,
    now: datetime | None = None,
    mode: int = 0o700,
) -> RunFolder:
    """Make a run folder below `root` with these files (path relative to the folder -> text).

    `fill` gets the draft and adds what depends on the run id or is no text (the snapshot, the manifest). Also
    made are the folders that the job writes into, logs, markers and checkpoints: sbatch does not make the
    log's folder. Raises UserError, and whatever `fill` raises; then nothing is left.
    """
    with Draft(root, name, now=now, mode=mode) as draft:
        try:
            draft.write(files)
            write_key(draft.folder.key)
            for folder in (draft.folder.logs, draft.folder.markers, draft.folder.checkpoints):
                make_folder(folder)
            if fill:
                fill(draft)
        except OSError as error:
            raise folder_error(error, draft.final.path) from error
        return draft.commit()


def refuse_root(root: Path, name: str) -> None:
    """Raise the UserError that `create` would raise, as far as it can be known without writing."""
    new_id(name)
    path = Path(os.path.abspath(root))
    while not os.path.lexists(path):
        path = path.parent
    reason = 0
    if not path.is_dir():
        reason = errno.ENOTDIR
    elif os.statvfs(path).f_flag & os.ST_RDONLY:
        reason = errno.EROFS
    elif not os.access(path, os.W_OK | os.X_OK):
        reason = errno.EACCES
    if reason:
        raise folder_error(OSError(reason, os.strerror(reason)), root)


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, unless they exist. Nobody else can write there. Raises OSError."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(0o755, exist_ok=True)
        path.chmod(path.stat().st_mode | stat.S_IRWXU)  # whatever the umask


def write_file(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Write a new file with what umask and the parent's ACL leave of `mode`. Nobody else can write it.

    Raises OSError, also where it exists.
    """
    mode &= ~OTHERS_WRITE
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


def write_key(path: Path) -> None:
    """Make a run's key, which nobody but its owner may read. Raises OSError, also where it exists."""
    write_file(path, secrets.token_hex(32).encode() + b"\n", mode=0o600)


def write_pair(path: Path) -> str:
    """Make a run's key pair for TLS with openssl. Returns why there is none, as does the file. Raises OSError."""
    try:
        made = subprocess.run(_PAIR, stdin=subprocess.DEVNULL, capture_output=True, timeout=20, check=True).stdout
        why = "" if made.count(b"-----BEGIN ") == 2 else "openssl did not make a key pair"
    except FileNotFoundError:
        why = "this machine has no openssl to make a key pair with"
    except (OSError, subprocess.SubprocessError) as error:
        printed = getattr(error, "stderr", None) or b""
        why = f"openssl did not make a key pair: {printed.decode(errors='replace')[-300:] or error}"
    write_file(path, " ".join(why.split()).encode() if why else made, mode=0o600)
    return why


def folder_error(error: OSError, path: Path) -> UserError:
    """Return the user's message for an error of the file system at a run folder."""
    where = os.fsdecode(error.filename) if error.filename else str(path)
    return UserError(f"the run folder cannot be written: {where}: {error.strerror or error}", todo=_TODO)


def _reserve(root: Path, name: str, now: datetime | None) -> tuple[RunFolder, RunFolder]:
    """Find a free id and make its temporary folder. mkdir is the lock: it fails for whoever comes second."""
    for _ in range(_TRIES):
        run_id = new_id(name, now)
        final = root / run_id
        part = root / f".{run_id}.part"
        try:
            part.mkdir(0o700)
        except FileExistsError:
            continue
        if os.path.lexists(final):
            part.rmdir()
            continue
        return RunFolder(final), RunFolder(part)
    raise UserError(f"no free run id for {name!r} in {root} after {_TRIES} tries", todo=_TODO)


def shared_folder(root: Path) -> str | None:
    """Return a warning if other users can replace a folder of runs, or one above it; None if they cannot."""
    for path in (root, *root.parents):
        try:
            facts = path.stat()
        except OSError:  # It will be made, without write access for others.
            continue
        if renamed_by_others(facts):
            return (
                f"other users can rename folders in {path}, so they can put a run folder of theirs in the place of "
                f"yours: chmod +t {path}, or choose another runs folder: --set paths.runs=FOLDER"
            )
    return None
