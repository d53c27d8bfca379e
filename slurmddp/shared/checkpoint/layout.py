"""Names, hashes and durability of checkpoint files."""

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from slurmddp.records import checkpoint
from slurmddp.records.checkpoint import FileFacts, Manifest
from slurmddp.shared.checkpoint import contents
from slurmddp.shared.files import open_plain

MANIFEST = "manifest.json"
DATA = "data.json"
COMPLETE = "COMPLETE"
RNG = "rng"

_STEP = re.compile(r"step-(\d{8,})")
_TEMPORARY = re.compile(r"\.(?:saving|old)-step-\d+-attempt-(\d+)-[0-9a-f]+")
_CHUNK = 1 << 22
_MOST_READERS = 8
_LARGEST_MANIFEST = 1 << 28  # bytes: some million files


class Rejected(Exception):
    """A checkpoint that must not be loaded: which file, and why."""

    def __init__(self, folder: Path, file: str, why: str) -> None:
        super().__init__(f"{folder / file}: {why}")
        self.folder = folder
        self.file = file
        self.why = why


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


def found(root: Path) -> list[tuple[int, Path]]:
    """Return all checkpoint folders in `root`, complete or not, newest first; none where `root` is not there."""
    if not root.is_dir():
        return []
    steps = [(step, folder) for folder in root.iterdir() if (step := step_of(folder)) is not None]
    return sorted(steps, reverse=True)


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
    """Return whether COMPLETE is there. Says nothing of the content: `verify` does."""
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


def read_contents(folder: Path, files: Iterable[str] | None = None) -> dict[str, contents.Stored]:
    """Return the tensors of a checkpoint by name, from .metadata, of which nothing is run.

    `files`: those that the manifest vouches for; none other may hold tensors. Raises Rejected, OSError.
    """
    try:
        stored = contents.read(folder / contents.FILE)
    except FileNotFoundError:
        raise Rejected(folder, contents.FILE, "is missing") from None
    except contents.Refused as refused:
        raise Rejected(folder, contents.FILE, str(refused)) from refused
    if files is not None:
        for file in sorted({contents.FILE, *(chunk.file for item in stored.values() for chunk in item.chunks)}):
            if file not in files:
                raise Rejected(folder, file, f"is not listed in {MANIFEST}, so its content cannot be verified")
    return stored


def verify(folder: Path) -> Manifest:
    """Check every file of a checkpoint against its manifest, and return the manifest.

    Raises Rejected that names the first file that is missing, of another size, of another content, or that would run
    code where it is loaded by other means than ours.
    """
    try:
        manifest = read_manifest(folder)
    except OSError as error:
        name = Path(error.filename or MANIFEST).name
        raise Rejected(folder, name, f"cannot be read: {error.strerror}") from error
    files = manifest.files
    for (name, wanted), actual in zip(files.items(), _all_checked(folder, list(files)), strict=True):
        if isinstance(actual, Rejected):
            raise actual
        if actual.bytes != wanted.bytes:
            raise Rejected(folder, name, f"has {actual.bytes} bytes, not {wanted.bytes}")
        if actual.sha256 != wanted.sha256:
            raise Rejected(folder, name, "has other content than was written (sha256 differs)")
    read_contents(folder, files)
    return manifest


def prune(
    root: Path, *, keep: int, keep_every: int | None = None, committed: int, rejected: Iterable[Path], attempt: int
) -> list[Path]:
    """Remove old checkpoints after `committed` (a step) was completed; returns what was removed.

    The `keep` newest complete ones up to that step stay, and so does each complete one whose step is a
    multiple of `keep_every`. Unfinished ones, and those that loading rejected,
    do not count, and go now that a good one is newer. Ones beyond the step are left alone: a run that comes
    to their step replaces them.
    """
    bad = set(rejected)
    up_to = [folder for step, folder in found(root) if step <= committed]
    good = [folder for folder in up_to if folder not in bad and is_complete(folder)]
    old = [folder for folder in good[keep:] if not keep_every or (step_of(folder) or 0) % keep_every]
    stale = old + [folder for folder in up_to if folder not in good]
    for folder in stale:
        discard(folder, attempt=attempt)
    return stale


def discard(folder: Path, *, attempt: int) -> None:
    """Remove a checkpoint. It loses its name first: one half deleted is never taken for a checkpoint."""
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "is not a folder, but a checkpoint needs its name", str(folder))
    step = step_of(folder) or 0
    hidden = folder.with_name(temporary_name("old", step, attempt, secrets.token_hex(4)))
    folder.rename(hidden)
    shutil.rmtree(hidden)


def remove_leftovers(root: Path, attempt: int) -> list[Path]:
    """Remove temporary folders of this and earlier attempts, whose writers are dead; returns them."""
    if not root.is_dir():
        return []
    dead = [
        folder
        for folder in sorted(root.iterdir())
        if (match := _TEMPORARY.fullmatch(folder.name)) and int(match.group(1)) <= attempt
    ]
    for folder in dead:
        shutil.rmtree(folder)
    return dead


def _all_checked(folder: Path, names: list[str]) -> Iterator[FileFacts | Rejected]:
    """Facts of all files, or why there are none, in their order; read by as many threads as there are cores."""

    from concurrent.futures import ThreadPoolExecutor  # Not for commands that only list.

    def check(name: str) -> FileFacts | Rejected:
        try:
            return _checked(folder, name)
        except Rejected as rejected:
            return rejected

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    with ThreadPoolExecutor(max(1, min(_MOST_READERS, cores, len(names)))) as pool:
        yield from pool.map(check, names)


def _checked(folder: Path, name: str) -> FileFacts:
    try:
        return facts(folder / name)
    except FileNotFoundError:
        raise Rejected(folder, name, "is missing") from None
    except OSError as error:
        raise Rejected(folder, name, f"cannot be read: {error.strerror}") from error
