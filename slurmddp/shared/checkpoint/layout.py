"""Names, hashes and durability of checkpoint files."""

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from slurmddp.records import checkpoint
from slurmddp.records.checkpoint import COMPLETE as COMPLETE
from slurmddp.records.checkpoint import FileFacts, Manifest
from slurmddp.shared.files import open_plain

MANIFEST = "manifest.json"
DATA = "data.json"
RNG = "rng"
SCHEDULER = "scheduler.pt"

_STEP = re.compile(r"step-(\d{8,})")
_TEMPORARY = re.compile(r"\.(?:saving|old)-step-\d+-attempt-(\d+)-[0-9a-f]+")
_CHUNK = 1 << 22
_LARGEST_MANIFEST = 1 << 28  # bytes: some million files


class Rejected(Exception):
    """A checkpoint that must not be loaded: which file, and why."""

    def __init__(self, folder: Path, file: str, why: str, *, unreadable: bool = False) -> None:
        super().__init__(f"{folder / file}: {why}")
        self.folder = folder
        self.file = file
        self.why = why
        #: Whether it could not be read, so that its content may well be good.
        self.unreadable = unreadable


def folder_name(step: int) -> str:
    """step-00001000."""
    return f"step-{step:08d}"


def temporary_name(kind: str, step: int, attempt: int, nonce: str) -> str:
    """Return a hidden name for a folder that is being written (`saving`) or thrown away (`old`)."""
    return f".{kind}-step-{step:08d}-attempt-{attempt:03d}-{nonce}"


def step_of(folder: Path) -> int | None:
    """Return the step in a checkpoint folder's name; None if the name is not one."""
    match = _STEP.fullmatch(folder.name)
    return int(match.group(1)) if match else None


def attempt_of(folder: Path) -> int | None:
    """Return the attempt in a `temporary_name`; None if the name is not one."""
    match = _TEMPORARY.fullmatch(folder.name)
    return int(match.group(1)) if match else None


def facts(path: Path, *, sync: bool = False) -> FileFacts:
    """Return bytes and sha256 of a regular file. With `sync`, its content is on stable storage."""
    digest, size = hashlib.sha256(), 0
    with open_plain(path) as file:
        chunk = memoryview(bytearray(min(_CHUNK, max(os.fstat(file.fileno()).st_size, 1))))
        while count := file.readinto(chunk):
            digest.update(chunk[:count])
            size += count
        if sync:
            os.fsync(file.fileno())
    return FileFacts(size, digest.hexdigest())


@contextlib.contextmanager
def durable(path: Path) -> Iterator[BinaryIO]:
    """Write a file that gets its name once all of it is on stable storage; else it is gone. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_durably(path: Path, content: bytes) -> None:
    """Write a file and wait until it is on stable storage. A reader sees nothing or all of it."""
    with durable(path) as file:
        file.write(content)


def write_json(path: Path, content: Any) -> None:
    """write_durably for JSON, indented for people."""
    write_durably(path, (json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode())


def sync_folder(path: Path) -> None:
    """Wait until a folder's entries are on stable storage."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def mark_complete(folder: Path) -> None:
    """Write COMPLETE, which vouches for the manifest, which vouches for the rest."""
    write_durably(folder / COMPLETE, (facts(folder / MANIFEST).sha256 + "\n").encode())


def is_complete(folder: Path) -> bool:
    """Return whether COMPLETE is there. Says nothing of the content."""
    return (folder / COMPLETE).is_file()


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a complete checkpoint, as COMPLETE vouches for it; reads no other file.

    Raises Rejected, and OSError for what is there and cannot be read.
    """
    try:
        with open_plain(folder / COMPLETE) as file:
            vouched = file.read(100).decode("ascii", errors="replace").strip()
    except FileNotFoundError:
        raise Rejected(folder, COMPLETE, "is missing: the checkpoint was never finished") from None
    try:
        with open_plain(folder / MANIFEST) as file:
            content = file.read(_LARGEST_MANIFEST)
    except FileNotFoundError:
        raise Rejected(folder, MANIFEST, "is missing") from None
    if hashlib.sha256(content).hexdigest() != vouched:
        raise Rejected(folder, MANIFEST, f"does not match the hash in {COMPLETE}")
    try:
        record = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Rejected(folder, MANIFEST, f"is not a manifest: {error!r}") from error
    try:
        return checkpoint.read(record)
    except ValueError as error:
        raise Rejected(folder, MANIFEST, str(error)) from error


def discard(
    folder: Path,
    *,
    attempt: int = 0,
    move: Callable[[Path, Path], Any] = os.rename,
    remove: Callable[[Path], Any] = shutil.rmtree,
) -> None:
    """Remove a checkpoint. It loses its name first: one half deleted is never taken for a checkpoint."""
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "is not a folder, but a checkpoint needs its name", str(folder))
    hidden = folder.with_name(temporary_name("old", step_of(folder) or 0, attempt, secrets.token_hex(4)))
    move(folder, hidden)
    remove(hidden)
