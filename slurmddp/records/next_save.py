"""The save that the next start of a script of the user's own may load, and a copy of it.

One process chooses it for all ranks of a start, so that no two of them load another one: torchrun's agent of the first
node, or the supervisor with launch.mode srun. A start from step 1 may write over a better save. So the newest save is
copied below the run folder, until a start was seen to go on behind the step of the one before it. A hard link would not
do: torch.save writes in place.
"""

import glob
import os
import shutil
import subprocess
import time
from typing import Any, Callable, Iterable, List, NamedTuple, Optional, Sequence

from slurmddp.records.checkpoint import COMPLETE
from slurmddp.records.events import Event, of
from slurmddp.records.rank_events import KeepingSave, RankStarted, Restarted, SaveKept
from slurmddp.records.saves import Save, measure, newest

#: Bytes of all copies, and their share of what is free on the disk, at most; seconds that one may take.
MOST_BYTES, MOST_SHARE, PATIENCE = 20 * 10**9, 0.1, 60
#: The events that decide.
KINDS = (RankStarted, Restarted)


class Places(NamedTuple):
    """run: its folder. watch: where the script saves, besides its checkpoints/. earlier: checkpoints/ of older runs."""

    run: str
    watch: Sequence[str]
    earlier: Sequence[str]


def before_start(places: Places, events: Iterable[Event], write: Callable[[Any], None]) -> str:
    """Return the newest whole save of the run, after it was kept if need be; empty without one.

    events: those of the run that are of KINDS. write: writes the facts of a new one.
    """
    known = list(events)
    begun = [event.time for event, _ in of(known, RankStarted) if event.time is not None]
    if not begun and not places.earlier:
        return ""
    # What a run finds that continues others may be theirs, and older.
    since = None if places.earlier else min(begun)
    save = newest([os.path.join(places.run, "checkpoints"), *places.watch], since)
    if save is None:
        save = newest(places.earlier)
    elif not _has_gone_on(known) and not os.path.exists(os.path.join(save.path, COMPLETE)):
        _keep(save, os.path.join(places.run, "kept"), write)  # slurmddp's library never writes over a checkpoint
    return save.path if save else ""


def _keep(save: Save, kept: str, write: Callable[[Any], None]) -> None:
    copies = _copies(kept)
    name = os.path.basename(save.path)
    for copy in copies:
        if copy.path.endswith("-" + name) and copy.bytes == save.bytes and abs(copy.time - save.time) < 1:
            return  # the ranks saved nothing since
    target = os.path.join(kept, "{:03d}-{}".format(len(copies) + 1, name))
    why = ""
    try:
        os.makedirs(kept, mode=0o700, exist_ok=True)
        limit = min(MOST_BYTES, MOST_SHARE * shutil.disk_usage(kept).free)
        if sum(copy.bytes for copy in copies) + save.bytes > limit:
            why = "{}, and all copies together may have {}".format(_size(save.bytes), _size(limit))
        else:
            write(KeepingSave(save.path, save.bytes, PATIENCE))
            why = _copy(save.path, target)
    except OSError as error:
        why = error.strerror or str(error)
    write(SaveKept(save.path, "" if why else target, save.bytes, why))


def _copies(kept: str) -> List[Save]:
    paths = sorted(glob.glob(os.path.join(glob.escape(kept), "[0-9]*")))
    return [copy for path in paths for copy in [measure(path)] if copy is not None]


def _has_gone_on(events: Sequence[Event]) -> bool:
    """Return whether the newest start that followed another one with steps was seen to go on behind these."""
    told = [facts.how for _, facts in of(events, Restarted) if facts.before is not None]
    return told[-1:] == ["went on"]


def _copy(source: str, target: str) -> str:
    """Copy a file or folder, whole or not at all, as a reflink where the file system can. Return why it failed."""
    part = os.path.join(os.path.dirname(target), ".part-" + os.path.basename(target))
    end = time.monotonic() + PATIENCE
    why = ""
    for options in (["--reflink=auto"], []):  # busybox does not know it
        if os.path.lexists(part):
            shutil.rmtree(part) if os.path.isdir(part) else os.unlink(part)
        process = subprocess.Popen(
            ["cp", "-a", *options, source, part], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        try:
            _, text = process.communicate(timeout=max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            _remove(process, part)
            return "the copy took longer than {} s".format(PATIENCE)
        if process.returncode == 0:
            os.rename(part, target)
            return ""
        why = text.decode("utf-8", "replace").strip().split("\n")[-1]
        why = why or "cp exited with code {}".format(process.returncode)
    return why


def _remove(process: "subprocess.Popen[bytes]", part: str) -> None:
    """Remove what a copy that was killed has left, in a bounded time: the file system may hang."""
    _wait(process, 5)
    _wait(subprocess.Popen(["rm", "-rf", "--", part], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL), 10)


def _wait(process: "subprocess.Popen[bytes]", seconds: float) -> Optional[int]:
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return None


def _size(count: float) -> str:
    return "{:.3g} GB".format(count / 1e9) if count >= 1e9 else "{:.3g} MB".format(count / 1e6)
