"""The lock file beside an image: what it was made from, and its hash, which nobody computes twice.

`<image file name>.lock.json` holds at least `bytes`, `mtime` (seconds, a float) and `sha256`; a reader trusts
the hash while the file's size and time are those, or the time is that without its fraction.
"""

import contextlib
import errno
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from slurmddp.errors import UserError
from slurmddp.shared.files import MAX_BYTES, open_plain


def check_name(target: Path) -> None:
    """Raise UserError for a path at which no image can be."""
    if ":" in target.name or "," in target.name or not target.name.isprintable():
        todo = "remove them: ':' and ',' break bind specifications"
        raise UserError(f"the image name {target.name!r} contains ':', ',' or a control character", todo=todo)
    if target.is_dir():
        raise UserError(f"{target} is a folder", todo=f"give a file in it: {target / 'image.sif'}")


def check_target(target: Path, force: bool) -> None:
    """Raise UserError for a path at which no image can or may be written."""
    check_name(target)
    if os.path.lexists(target) and not force:
        if (other := other_owner(target)) is not None:
            raise UserError(
                f"{target} belongs to {other}, so nobody knows whether it was built from these inputs",
                todo="choose another file; if you trust that user, use the image as it is: container.image",
            )
        raise UserError(f"{target} already exists", todo="use --force to replace it after the build")


def other_owner(path: Path) -> str | None:
    """Return the name of another user who owns a file; None if it is this user's or there is none."""
    from slurmddp.run.gate import owner_name  # here: few files are another user's

    try:
        owner = path.lstat().st_uid
    except OSError:
        return None
    return None if owner == os.geteuid() else owner_name(owner)


_CHUNK = 1 << 22
#: Seconds: file systems keep times in steps of up to a microsecond.
_CLOCK = 1e-5
#: Of no file: infinity, NaN and numbers that no float holds are not below it.
_NEVER = 1e12


def lock_path(image: Path) -> Path:
    return image.with_name(image.name + ".lock.json")


def read_lock(image: Path) -> dict[str, Any] | None:
    """The lock of this very file; None where there is none or the image was changed after it.

    Only the image's owner, this user and root write locks: in a folder that others share, anybody can lay one there.
    """
    try:
        state = image.stat()
        with open_plain(lock_path(image)) as file:
            writer = os.fstat(file.fileno()).st_uid
            lock = json.loads(file.read(MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    if writer not in (state.st_uid, os.geteuid(), 0) or not _has_types(lock) or lock.get("bytes") != state.st_size:
        return None
    then, now = lock.get("mtime"), state.st_mtime
    if not isinstance(then, (int, float)) or isinstance(then, bool) or not 0 <= then < _NEVER:
        return None
    # scp -p and tar keep no fractions of a second
    return lock if abs(then - now) < _CLOCK or now == math.floor(then) else None


def _has_types(lock: Any) -> bool:
    """Return whether what is read of a lock has the types that slurmddp writes."""
    if not isinstance(lock, dict):
        return False
    parts = {name: lock.get(name) or {} for name in ("registry", "builder", "digests", "inputs")}
    if not all(isinstance(part, dict) for part in parts.values()):
        return False
    registry = (parts["registry"].get(name) for name in ("digest", "torch", "cuda", "driver", "nccl"))
    texts = (*(lock.get(name) for name in ("recipe", "base", "torch", "sha256")), *registry)
    files = parts["inputs"].get("files") or {}
    return isinstance(files, dict) and all(text is None or isinstance(text, str) for text in texts)


def lock_text(facts: Mapping[str, Any]) -> str:
    return json.dumps(facts, indent=2, ensure_ascii=False) + "\n"


def sha256(path: Path, between: Callable[[], None] = lambda: None) -> str:
    """The file's SHA-256 in hexadecimal; `between` is called every few MB and may raise to end it."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            between()
            digest.update(chunk)
    return digest.hexdigest()


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn errors of the file system into the user's message. Raises UserError."""
    try:
        yield
    except OSError as error:
        reason = "a file with this name exists" if error.errno == errno.EEXIST else error.strerror
        message = f"{error.filename or path} cannot be written: {reason}"
        raise UserError(message, todo="choose another path for the image") from None
