"""The checkpoints in one folder: the only code that knows which is complete, which is good, and which may go.

No torch: the login side lists, verifies, prunes and exports with it. Ranks save with it, once their shards are written.
"""

import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from slurmddp.records.checkpoint import FileFacts, Manifest
from slurmddp.shared.checkpoint import contents, export, layout, shards
from slurmddp.shared.checkpoint.layout import Rejected

T = TypeVar("T")
_MOST_READERS = 8


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint folder.

    fault: why it would not be loaded; None where nothing speaks against it. unreadable: the fault is that something
    could not be read, so that its content may well be good.
    """

    path: Path
    step: int
    fault: str | None = None
    unreadable: bool = False


Item = TypeVar("Item", bound=Checkpoint)


@dataclass(frozen=True)
class Retention(Generic[Item]):
    """Which checkpoints stay and which go, newest first. left: ones that are not usable and stay, too."""

    kept: Sequence[Item]
    removed: Sequence[Item]
    left: Sequence[Item]


def retain(
    items: Iterable[Item], keep: int, keep_every: int | None, verified: Callable[[Item], Item] = lambda item: item
) -> Retention[Item]:
    """Sort out checkpoints, newest first: the `keep` newest good ones stay, and each good one whose step is a multiple
    of `keep_every`.

    Bad ones go where a good one is newer; what cannot be read stays, and so does a link: whoever put it there had a
    reason. verified: called for each of which nothing bad is known, until there are `keep` good ones.
    """
    kept: list[Item] = []
    removed: list[Item] = []
    left: list[Item] = []
    for item in items:
        if len(kept) < keep and item.fault is None:
            item = verified(item)
        is_link = item.path.is_symlink()
        if item.fault is not None:
            (removed if kept and not item.unreadable and not is_link else left).append(item)
        elif len(kept) < keep or is_link or (keep_every and item.step % keep_every == 0):
            kept.append(item)
        else:
            removed.append(item)
    return Retention(kept, removed, left)


class Checkpoints:
    """The checkpoints in `root`, each in a folder of its own. A root that is not there has none."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folders(self) -> list[tuple[int, Path]]:
        """List step and folder of all checkpoints, complete or not, newest first. Raises OSError."""
        if not self.root.is_dir():
            return []
        steps = [(step, path) for path in self.root.iterdir() if (step := layout.step_of(path)) is not None]
        return sorted(steps, reverse=True)

    def newest(self, check: Callable[[Path], T], rejected: Callable[[Rejected], None]) -> T | None:
        """Return what `check` returns for the newest checkpoint that it does not reject; None if there is none.

        check: `verify`, or a cheaper one, which raises Rejected. rejected: hears of each one on the way.
        Raises OSError where the folder cannot be read.
        """
        for _, folder in self.folders():
            try:
                return check(folder)
            except Rejected as error:
                rejected(error)
        return None

    @property
    def any_complete(self) -> bool:
        try:
            return any(layout.is_complete(folder) for _, folder in self.folders())
        except OSError:
            return False

    def save(self, folder: Path, manifest: Manifest, data: Mapping[str, Any]) -> Manifest:
        """Turn a folder of a save into a complete checkpoint, which replaces one of the same step; return its manifest.

        folder: from `layout.temporary_name`, with the shards and random states that `manifest.files` lists, which are
        on stable storage. data: the content of data.json. Raises OSError.
        """
        layout.write_json(folder / layout.DATA, data)
        data_facts = layout.facts(folder / layout.DATA)
        manifest = manifest._replace(files={**manifest.files, layout.DATA: data_facts})
        layout.write_json(folder / layout.MANIFEST, manifest.write())
        layout.sync_folder(folder / layout.RNG)
        layout.sync_folder(folder)
        final = self.root / layout.folder_name(manifest.step)
        if final.exists():
            # Unfinished, or refused when this attempt loaded: a good one would have been loaded, and its step
            # not redone.
            layout.discard(final, attempt=manifest.attempt or 0)
        folder.rename(final)
        layout.sync_folder(self.root)
        layout.mark_complete(final)
        return manifest

    def abandon(self, folder: Path, step: int) -> None:
        """Remove what a save that failed has left."""
        shutil.rmtree(folder, ignore_errors=True)
        final = self.root / layout.folder_name(step)
        if final.is_dir() and not layout.is_complete(final):
            shutil.rmtree(final, ignore_errors=True)

    @staticmethod
    def verify(
        folder: Path,
        *,
        content: bool = True,
        strict: bool = False,
        progress: Callable[[int], None] = lambda count: None,
    ) -> Manifest:
        """Check every file of a checkpoint against its manifest, and return the manifest.

        Raises Rejected that names the first file that is missing, of another size, of another content, or that would
        run code where it is loaded by other means than ours. content: False compares sizes only, without reading what
        may be terabytes. strict: look into the shards, too, which torch does for those who load them (see
        `shards.check`). progress: gets the bytes of each file that was hashed.
        """
        try:
            manifest = layout.read_manifest(folder)
            for name, expected in manifest.files.items():
                _check_size(folder, name, expected)
            if content:
                _check_content(folder, manifest.files, progress)
                stored = read_contents(folder, manifest.files)
                if strict:
                    shards.check(folder, stored, manifest.files)
        except OSError as error:
            name = os.path.relpath(error.filename, folder) if error.filename else layout.MANIFEST
            raise Rejected(folder, name, f"cannot be read: {error.strerror}", unreadable=True) from error
        return manifest

    def prune(
        self, *, keep: int, keep_every: int | None, committed: int, rejected: Iterable[Path], attempt: int
    ) -> list[Path]:
        """Remove old checkpoints after `committed` (a step) was completed; return what was removed. See `retain`.

        Unfinished ones, and those that loading rejected, do not count, and go now that a good one is newer. Ones
        beyond the step are left alone: a run that comes to their step replaces them. Raises OSError.
        """
        bad = set(rejected)
        items = []
        for step, path in self.folders():
            if step <= committed:
                usable = path not in bad and layout.is_complete(path)
                items.append(Checkpoint(path, step, None if usable else "unfinished or rejected"))
        removed = [item.path for item in retain(items, keep, keep_every).removed]
        for path in removed:
            layout.discard(path, attempt=attempt)
        return removed

    def leftovers(self, attempt: int | None = None) -> list[Path]:
        """List the folders of saves that go on, were cut off, or are half removed. attempt: of this and earlier ones.

        Raises OSError.
        """
        if not self.root.is_dir():
            return []
        attempts = ((path, layout.attempt_of(path)) for path in sorted(self.root.iterdir()))
        return [path for path, of in attempts if of is not None and (attempt is None or of <= attempt)]

    def remove_leftovers(self, attempt: int) -> None:
        """Remove those of this and earlier attempts, whose writers are dead. Raises OSError."""
        for path in self.leftovers(attempt):
            shutil.rmtree(path)

    @staticmethod
    def export(folder: Path, output: Path, *, form: str, what: str = "model") -> int:
        """Write the tensors of a checkpoint to one file, and return how many: see `export.write`."""
        return export.write(folder, read_contents(folder), output, form=form, what=what)


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
                raise Rejected(folder, file, f"is not listed in {layout.MANIFEST}, so its content cannot be verified")
    return stored


def _check_size(folder: Path, name: str, expected: FileFacts) -> None:
    try:
        size = (folder / name).stat().st_size
    except FileNotFoundError:
        raise Rejected(folder, name, "is missing") from None
    if size != expected.bytes:
        raise Rejected(folder, name, f"has {size} bytes, not {expected.bytes}")


def _check_content(folder: Path, files: Mapping[str, FileFacts], progress: Callable[[int], None]) -> None:
    """Hash the files, by as many threads as there are cores."""
    from concurrent.futures import ThreadPoolExecutor  # not for commands that only list

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    pool = ThreadPoolExecutor(max(1, min(_MOST_READERS, cores, len(files))))
    try:
        hashes = pool.map(layout.facts, [folder / name for name in files])
        for (name, expected), actual in zip(files.items(), hashes, strict=True):
            if actual.sha256 != expected.sha256:
                raise Rejected(folder, name, "has other content than was written (sha256 differs)")
            progress(actual.bytes)
    finally:
        pool.shutdown(cancel_futures=True)
