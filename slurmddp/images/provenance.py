"""The lock file beside an image: what it was made from, and its hash, which nobody computes twice.

`<image file name>.lock.json` holds at least `bytes`, `mtime` (seconds, a float) and `sha256`; a reader trusts
the hash while the file's size and time are those, or the time is that without its fraction.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from slurmddp.errors import UserError

_CHUNK = 1 << 22
#: Seconds: file systems keep times in steps of up to a microsecond.
_CLOCK = 1e-5


def lock_path(image: Path) -> Path:
    """Return where the image's lock file is."""
    return image.with_name(image.name + ".lock.json")


def read_lock(image: Path) -> dict[str, Any] | None:
    """The lock of this very file; None where there is none or the image was changed after it."""
    try:
        state = image.stat()
        lock = json.loads(lock_path(image).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(lock, dict) or lock.get("bytes") != state.st_size:
        return None
    return lock if _same_time(lock.get("mtime"), state.st_mtime) else None


def _same_time(then: object, now: float) -> bool:
    """Return whether the times agree, or one was cut to whole seconds (scp -p and tar keep no fractions)."""
    if not isinstance(then, (int, float)) or isinstance(then, bool):
        return False
    return abs(then - now) < _CLOCK or now == math.floor(then)


def lock_text(facts: Mapping[str, Any]) -> str:
    """The lock file's text."""
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
        why = "a file with this name exists" if error.errno == errno.EEXIST else error.strerror
        raise UserError(
            f"{error.filename or path} cannot be written: {why}",
            todo="choose another path for the image",
        ) from None
