"""The checkpoints of a run as a login node sees them: found and hashed, without torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from slurmddp.errors import UserError
from slurmddp.records.checkpoint import Manifest
from slurmddp.run.layout import RunFolder
from slurmddp.run.usage import extent
from slurmddp.shared.beneath import check_folder
from slurmddp.shared.checkpoint import layout
from slurmddp.shared.files import read_json

#: Folders whose names begin so are being written, or half removed (`layout.temporary_name`).
_HIDDEN = (".saving-step-", ".old-step-")
_MOST_READERS = 8


@dataclass(frozen=True)
class Stored:
    """One checkpoint folder.

    run: the run that wrote it, own: whether that is the run that was asked about. files and bytes: all that lies in
    it. saved: when it was completed, in unix seconds (for an unfinished one: when it last changed). fault: why it
    would not be loaded, None where nothing speaks against it; content is compared by `check` only. unreadable: the
    fault is that something could not be read, so that its content may well be good.
    """

    path: Path
    step: int
    run: str
    own: bool
    files: int
    bytes: int
    saved: float
    world: int | None
    fault: str | None
    unreadable: bool = False


@dataclass(frozen=True)
class Leftover:
    """A folder of a save that is going on, or was cut off."""

    path: Path
    bytes: int


def survey(folder: RunFolder) -> list[Stored]:
    """Return the checkpoints of a run, newest first, then those of the runs that it continues, in the order of loading.

    Nothing is hashed. Raises UserError where the run keeps none that slurmddp knows, or they cannot be read.
    """
    found: list[Stored] = []
    for root in _roots(folder):
        try:
            is_own = root == folder.checkpoints
            if is_own and root.is_symlink():
                check_folder(root, folder.path)
            found += [_look(path, step, root.parent.name, is_own) for step, path in _found(root)]
        except OSError as error:
            raise _unreadable(error, root) from error
    return found


def own(folder: RunFolder) -> list[Stored]:
    """Return the run's own checkpoints, newest first, at least one. Raises UserError if it has none."""
    found = survey(folder)
    mine = [item for item in found if item.own]
    if not mine:
        todo = "wait: it saves after checkpoint.interval or checkpoint.every_steps, and at its end"
        if found:
            todo = f"it resumed from a checkpoint of {found[0].run}: use that run instead"
        raise UserError(f"run {folder.id} has no checkpoints yet", where=str(folder.checkpoints), todo=todo)
    return mine


def at_step(found: list[Stored], step: int) -> Stored:
    """Return the checkpoint of a step. Raises UserError that lists the steps there are."""
    for item in found:
        if item.step == step:
            return item
    steps = ", ".join(str(item.step) for item in found[:10]) + (", ..." if len(found) > 10 else "")
    raise UserError(
        f"run {found[0].run} has no checkpoint of step {step}", todo=f"its checkpoints are of steps {steps}"
    )


def resumed_from(found: list[Stored]) -> Stored | None:
    """Return the one that an attempt would load now, as far as sizes tell: the ranks compare the content as well."""
    return next((item for item in found if item.fault is None), None)


def leftovers(folder: RunFolder) -> list[Leftover]:
    """Return folders of saves that are not finished. Raises UserError if they cannot be read."""
    root = folder.checkpoints
    try:
        hidden = [path for path in sorted(root.iterdir()) if path.name.startswith(_HIDDEN)] if root.is_dir() else []
        return [Leftover(path, extent(path)[0]) for path in hidden]
    except OSError as error:
        raise _unreadable(error, root) from error


def check(item: Stored, progress: Callable[[int], None] = lambda count: None) -> Stored:
    """Return the checkpoint with its `fault`, after hashing each file; progress: gets the bytes of each."""
    from concurrent.futures import ThreadPoolExecutor  # here: only this needs it

    from slurmddp.shared.checkpoint import shards

    pool = ThreadPoolExecutor(min(_MOST_READERS, os.cpu_count() or 1))
    try:
        files = glance(item.path).files
        facts = pool.map(layout.facts, [item.path / name for name in files])
        for (name, wanted), actual in zip(files.items(), facts, strict=True):
            if actual.sha256 != wanted.sha256:
                raise layout.Rejected(item.path, name, "has other content than was written (sha256 differs)")
            progress(actual.bytes)
        shards.check(item.path, layout.read_contents(item.path, files), files)
    except layout.Rejected as rejected:
        return replace(item, fault=f"{rejected.file} {rejected.why}")
    except OSError as error:
        return replace(item, fault=_reason(error, item.path), unreadable=True)
    finally:
        pool.shutdown(cancel_futures=True)
    return replace(item, fault=None)


def newest_good(found: list[Stored], refused: Callable[[Stored], None]) -> Stored | None:
    """Return the first whose content is whole; each one refused on the way is handed to `refused`."""
    for item in found:
        checked = check(item) if item.fault is None else item
        if checked.fault is None:
            return checked
        refused(checked)
    return None


def glance(path: Path) -> Manifest:
    """Return the manifest of a complete checkpoint whose files are all there with the sizes that it gives.

    What `layout.verify` does, without reading what may be terabytes. Raises layout.Rejected, OSError.
    """
    manifest = layout.read_manifest(path)
    for name, wanted in manifest.files.items():
        try:
            size = (path / name).stat().st_size
        except FileNotFoundError:
            raise layout.Rejected(path, name, "is missing") from None
        if size != wanted.bytes:
            raise layout.Rejected(path, name, f"has {size} bytes, not {wanted.bytes}")
    return manifest


def _look(path: Path, step: int, run: str, is_own: bool) -> Stored:
    """One checkpoint, without hashing. A part that cannot be read is its fault, not an error."""
    fault: str | None = None
    unreadable = False
    world: int | None = None
    files, size, saved = 0, 0, 0.0
    try:
        saved = path.stat().st_mtime
        size, files = extent(path)
        world = glance(path).world
        saved = (path / layout.COMPLETE).stat().st_mtime
    except layout.Rejected as rejected:
        fault = f"{rejected.file} {rejected.why}"
    except OSError as error:
        fault, unreadable = _reason(error, path), True
    return Stored(path, step, run, is_own, files, size, saved, world, fault, unreadable)


def _roots(folder: RunFolder) -> list[Path]:
    """The folders of checkpoints that the run's ranks look through, in their order."""
    if not folder.job_json.exists():
        # Its script may take the runtime's Checkpointer, which then writes where a bundled task's lie.
        if folder.checkpoints.exists() and (not folder.checkpoints.is_dir() or any(folder.checkpoints.iterdir())):
            return [folder.checkpoints]
        raise UserError(
            f"run {folder.id} ran your own script: slurmddp does not know where it saves checkpoints",
            todo="look for them where the script writes them",
        )
    try:
        earlier = read_json(folder.job_json, folder.path).get("resume_from", [])
        return [folder.checkpoints, *(Path(text) for text in earlier)]
    except (ValueError, AttributeError, TypeError) as error:
        raise UserError(f"is damaged ({error})", where=str(folder.job_json), todo="use another run") from error
    except OSError as error:
        raise _unreadable(error, folder.job_json) from error


def _found(root: Path) -> list[tuple[int, Path]]:
    if root.exists() and not root.is_dir():
        raise NotADirectoryError(20, "it is a file, not a folder", str(root))
    return layout.found(root)


def _reason(error: OSError, path: Path) -> str:
    name = Path(error.filename).name if error.filename else path.name
    return f"{name} cannot be read: {error.strerror}"


def _unreadable(error: OSError, path: Path) -> UserError:
    todo = "ask its owner for access" if isinstance(error, PermissionError) else None
    return UserError(f"cannot be read: {error.strerror}", where=str(error.filename or path), todo=todo)
