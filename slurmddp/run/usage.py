"""What a run takes on disk. Links are counted as links, never what they lead to."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slurmddp.run.layout import RunFolder


@dataclass(frozen=True)
class Usage:
    """Bytes and files of a run folder, and the bytes of its checkpoints and logs. changed: unix seconds."""

    folder: RunFolder
    bytes: int
    files: int
    checkpoints: int
    logs: int
    changed: float


def usage(folder: RunFolder, refused: Callable[[OSError], None]) -> Usage:
    """Measure a run folder. refused: called for each folder in it that cannot be read."""
    size, files = extent(folder.path, refused)
    parts = (folder.checkpoints, folder.logs)
    checkpoints, logs = (0 if path.is_symlink() else extent(path, lambda error: None)[0] for path in parts)
    return Usage(folder, size, files, checkpoints, logs, changed(folder))


def extent(path: Path, refused: Callable[[OSError], None] | None = None) -> tuple[int, int]:
    """Return the bytes and files below a folder. What is removed meanwhile does not count.

    Raises OSError for what cannot be read, unless `refused` takes it.
    """

    def failed(error: OSError) -> None:
        if isinstance(error, FileNotFoundError):
            return
        if refused is None:
            raise error
        refused(error)

    size = files = 0
    for root, _, names in os.walk(path, onerror=failed):
        for name in names:
            try:
                size += os.lstat(os.path.join(root, name)).st_size
            except OSError as error:
                failed(error)
            else:
                files += 1
    return size, files


def changed(folder: RunFolder) -> float:
    """Return when the run last wrote something that tells of progress, in unix seconds; 0 if it has no file."""
    newest = 0.0
    for path in (folder.manifest, folder.submission, folder.events, folder.metrics, folder.progress, folder.job_log):
        try:
            newest = max(newest, path.stat().st_mtime)
        except OSError:
            continue
    return newest
