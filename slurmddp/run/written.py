"""Which files of a working directory changed while earlier runs ran in it: a script may load what another run saved.

Nobody watches the programs: what is known is when a file last changed, and when a run had ranks.
"""

import os
import time
from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from slurmddp.errors import UserError
from slurmddp.records.events import of
from slurmddp.records.job_events import AttemptStarted
from slurmddp.run import index, manifest
from slurmddp.run.evidence import evidence
from slurmddp.run.layout import RunFolder
from slurmddp.run.snapshot_filter import is_run_folder
from slurmddp.shared.files import read_json
from slurmddp.shared.units import listed
from slurmddp.visible import one_line

_RUNS = 50  # newest runs that are looked at
_ENTRIES, _DEPTH = 2000, 3  # of the working directory
_SHOWN = 3
_SILENT = 60.0  # seconds after which a run whose end nobody wrote down is not taken for running
#: What an editor changes while a run runs.
_EDITED = (".py", ".pyc", ".sh", ".sbatch", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".md", ".rst", ".ipynb", ".def")
_CHECKPOINTS = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".pkl", ".npz", ".h5", ".tar")


class Span(NamedTuple):
    """When a run had ranks, in seconds since 1970."""

    run: str
    begin: float
    end: float


def written_before(workdir: str, exclude: Collection[str] = ()) -> dict[str, str]:
    """Return the files of a working directory that changed while one of the newest runs of this user ran in it.

    By relative path: the newest such run. Checkpoints come first, then the newest files. exclude: folders to skip.
    """
    spans = [*_spans(os.path.realpath(workdir))]
    if not spans:
        return {}
    found = sorted(_files(workdir, exclude), key=lambda each: (not each[0].endswith(_CHECKPOINTS), -each[1]))
    runs = ((path, next((each.run for each in spans if each.begin <= at <= each.end), None)) for path, at in found)
    return {path: run for path, run in runs if run is not None}


def files_text(files: Mapping[str, str]) -> str:
    """Return files with their runs, on one line."""
    return listed([f"{one_line(path)} (run {run})" for path, run in files.items()], _SHOWN)


def written_again(folder: RunFolder) -> str | None:
    """Return a note on the files of `written_before` that changed again while this run ran; None without one."""
    try:
        facts = read_json(folder.manifest, folder.path)
        workdir, before = str(facts["workdir"]), dict(facts["files_before"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # `status` does not need the manifest
    span = _span(folder) if before else None
    if span is None:
        return None
    both = {path: str(run) for path, run in before.items() if span.begin <= _changed(workdir, path) <= span.end}
    return (
        f"changed while this run ran, and before it while others did: {files_text(both)}; in {workdir}"
        if both
        else None
    )


def _changed(workdir: str, path: str) -> float:
    try:
        return os.stat(os.path.join(workdir, path)).st_mtime
    except OSError:
        return 0.0


def _spans(workdir: str) -> Iterator[Span]:
    for entry in islice(index.entries(), _RUNS):
        try:
            there = manifest.read(entry.folder).get("workdir")
        except UserError:
            continue  # what `status` says of it
        if isinstance(there, str) and os.path.realpath(there) == workdir and (span := _span(entry.folder)) is not None:
            yield span


def _span(folder: RunFolder) -> Span | None:
    """Return when a run had ranks; None if it had none yet."""
    try:
        facts = evidence(folder)
    except (UserError, OSError):
        return None
    begins = [event.time for event, _ in of(facts.events, AttemptStarted) if event.time is not None]
    if not begins or facts.attempt is None:
        return None
    logs = folder.attempt_logs(facts.attempt)
    signs = [
        folder.events,
        folder.job_log,
        *logs.glob("*.log"),
        *folder.observed(facts.attempt, "0").parent.glob("*/*"),
    ]
    end = max(map(os.path.getmtime, filter(os.path.exists, signs)), default=0.0)
    now = time.time()
    return Span(folder.id, int(min(begins)), now if facts.ended is None and now - end < _SILENT else end)


def _files(workdir: str, exclude: Collection[str]) -> Iterator[tuple[str, float]]:
    """Yield the files of a folder, each with its time of change: no hidden ones, no sources, nothing of runs."""
    left, pending = _ENTRIES, [("", 0)]
    while pending and left > 0:
        relative, depth = pending.pop()
        try:
            entries = [*islice(os.scandir(os.path.join(workdir, relative)), left)]
        except OSError:
            continue
        left -= len(entries)
        if any(each.name == "pyvenv.cfg" for each in entries):
            continue
        for each in entries:
            path = os.path.join(relative, each.name)
            if each.name.startswith((".", "__pycache__")):
                continue
            try:
                if each.is_file(follow_symlinks=False) and not each.name.endswith(_EDITED):
                    yield path, each.stat(follow_symlinks=False).st_mtime
                elif each.is_dir(follow_symlinks=False) and depth < _DEPTH and each.path not in exclude:
                    if not is_run_folder(Path(each.path)):
                        pending.append((path, depth + 1))
            except OSError:
                continue  # removed meanwhile
