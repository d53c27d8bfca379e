"""Before the ranks of a script of the user's own start: the save that they may load, and a copy of it.

The agent of the first node does it, once per start, and all ranks get its answer: no two of them choose another one.
A start from step 1 may write over a better save. So the newest save is copied below the run folder, until a start was
seen to go on behind the step of the one before it. A hard link would not do: torch.save writes in place.
"""

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmddp.records.events import of
from slurmddp.records.rank_events import KeepingSave, RankStarted, Restarted, SaveKept
from slurmddp.records.saves import Save, measure, newest
from slurmddp.runtime.environment import RESUME
from slurmddp.runtime.journal import Events, read_events
from slurmddp.shared.run_folder import RunFolder

#: Bytes of all copies, and their share of what is free on the disk, at most; seconds that one may take.
MOST_BYTES, MOST_SHARE, PATIENCE = 20 * 10**9, 0.1, 60


@dataclass(frozen=True)
class Saves:
    """watch: where the script saves, besides the run's checkpoints/. earlier: checkpoints/ of runs before this one."""

    folder: RunFolder
    events: Events
    watch: Sequence[str]
    earlier: Sequence[str]

    def before_start(self) -> str:
        """Return the newest whole save of the run, after it was kept if need be; empty without one."""
        events = list(read_events(self.folder.events, RankStarted, Restarted))
        begun = [event.time for event, _ in of(events, RankStarted) if event.time is not None]
        if not begun and not self.earlier:
            return ""
        # What a run finds that continues others may be theirs, and older.
        since = None if self.earlier else min(begun)
        found = newest([str(self.folder.checkpoints), *self.watch], since)
        if found is None:
            found = newest(self.earlier)
        elif not _has_gone_on(events) and not os.path.exists(os.path.join(found.path, "COMPLETE")):
            self._keep(found)  # slurmddp's library never writes over a checkpoint
        return found.path if found else ""

    def _keep(self, save: Save) -> None:
        kept = self.folder.kept
        copies = [copy for path in sorted(kept.glob("[0-9]*")) if (copy := measure(str(path)))]
        name = os.path.basename(save.path)
        for copy in copies:
            if copy.path.endswith(f"-{name}") and copy.bytes == save.bytes and abs(copy.time - save.time) < 1:
                return  # the ranks saved nothing since
        target = kept / f"{len(copies) + 1:03d}-{name}"
        why = ""
        try:
            kept.mkdir(mode=0o700, exist_ok=True)
            limit = min(MOST_BYTES, MOST_SHARE * shutil.disk_usage(kept).free)
            if sum(copy.bytes for copy in copies) + save.bytes > limit:
                why = f"{_size(save.bytes)}, and all copies together may have {_size(limit)}"
            else:
                self.events.write(KeepingSave(save.path, save.bytes, PATIENCE))
                why = _copy(save.path, target)
        except OSError as error:
            why = error.strerror or str(error)
        self.events.write(SaveKept(save.path, "" if why else str(target), save.bytes, why))


def read(environ: Mapping[str, str], folder: RunFolder, events: Events) -> Saves | None:
    """Return what the job says of the saves of its script; None for a bundled task."""
    if RESUME not in environ:
        return None
    earlier = [path for path in environ.get("SLURMDDP_RESUME_FROM", "").split(":") if path]
    return Saves(folder, events, json.loads(environ[RESUME])["watch"], earlier)


def _has_gone_on(events: Sequence[object]) -> bool:
    """Return whether the newest start that followed another one with steps was seen to go on behind these."""
    told = [facts.how for _, facts in of(events, Restarted) if facts.before is not None]  # type: ignore[arg-type]
    return told[-1:] == ["went on"]


def _copy(source: str, target: Path) -> str:
    """Copy a file or folder, whole or not at all, as a reflink where the file system can. Return why it failed."""
    part = target.with_name(f".part-{target.name}")
    end = time.monotonic() + PATIENCE
    why = ""
    for options in (["--reflink=auto"], []):  # busybox does not know it
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(part) if part.is_dir() else part.unlink()
        process = subprocess.Popen(
            ["cp", "-a", *options, source, str(part)], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        try:
            _, text = process.communicate(timeout=max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            _remove(process, part)
            return f"the copy took longer than {PATIENCE} s"
        if process.returncode == 0:
            part.rename(target)
            return ""
        why = text.strip().split("\n")[-1] or f"cp exited with code {process.returncode}"
    return why


def _remove(process: "subprocess.Popen[str]", part: Path) -> None:
    """Remove what a copy that was killed has left, in a bounded time: the file system may hang."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=5)
    removal = subprocess.Popen(["rm", "-rf", "--", str(part)], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        removal.wait(timeout=10)


def _size(count: float) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"
