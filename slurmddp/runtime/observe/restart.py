"""What a start of somebody else's script went on from, where an earlier start of the run has made steps.

The rules, on rank 0, once its first optimizer has made three steps, or the script is about to exit:

- `went on`: the optimizer's own count of steps did not begin at 1; then the first step of this start is known. Or Adam
  or AdamW had a state before its first step here, but counts on the GPU: then it is not known.
  Or slurmddp's library has loaded a checkpoint. Or no earlier start has made a step: there was nothing to lose.
- `from zero`: none of that, and this process has read nothing that an earlier start can have written: see `Reads`.
- `unknown`: all else, such as weights that were loaded while the optimizer began at step 1.

A script that reads something later, within its first steps, makes `from zero` unknown. A count on a GPU is not read:
that would wait for the GPU.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmddp.runtime.journal import Events
from slurmddp.runtime.observe.reads import Reads
from slurmddp.runtime.observe.signs import ENOUGH, Steps
from slurmddp.runtime.watch import failures

WENT_ON, FROM_ZERO, UNKNOWN = "went on", "from zero", "unknown"
#: Steps of a start after which a file that it reads is no longer taken for what it began from.
_LATEST = 1000


@dataclass(frozen=True)
class Earlier:
    """What the run's files tell of the starts before this one.

    since: when the first of them began, unix seconds. before: the step that the newest was last seen at. best: the
    highest step of all. Both are None if no step was seen.
    """

    since: float
    before: int | None
    best: int | None


class Restart:
    """Tells what this start went on from, as the event `restarted`: once, and again if that becomes unknown."""

    def __init__(self, events: Events, path: Path) -> None:
        """Look from now on. path: events.jsonl. The file of the step is as the start before has left it."""
        self._events, self._path, self._began = events, path, time.time()
        self._earlier = _earlier(path, failures.step_of(path.parent, os.environ))
        self._reads = Reads(self._earlier.since) if self._earlier and self._earlier.before is not None else None
        self._how, self._over = "", self._earlier is None

    def ignore_this_thread(self) -> None:
        """Leave out what the calling thread reads."""
        if self._reads:
            self._reads.ignored.add(threading.get_ident())

    def look(self, steps: Steps, *, last: bool = False) -> None:
        """Look again. last: the script is about to exit."""
        if self._over:
            return
        if self._how == FROM_ZERO and self._reads:
            if self._reads.found:
                self._tell(UNKNOWN, None, self._reads.found)
            self._over = self._how != FROM_ZERO or steps.seen > _LATEST
        elif steps.calls >= ENOUGH or (steps.calls and (last or self._reads is None)):
            self._judge(steps)
            self._over = self._how != FROM_ZERO
        if self._over and self._reads:
            self._reads.active = False

    def _judge(self, steps: Steps) -> None:
        if self._reads is None:
            return self._tell(WENT_ON, 1)
        if (loaded := _loaded(self._path)) is not None:
            return self._tell(WENT_ON, loaded + 1)
        if steps.began is not None and steps.began > 1:
            return self._tell(WENT_ON, steps.began)
        if steps.began is None and steps.loaded:
            return self._tell(WENT_ON, None)
        if self._reads.found:
            began = "" if steps.began is None else ", and its optimizer began at step 1"
            return self._tell(UNKNOWN, None, self._reads.found + began)
        # What this start itself writes from here on is no state of an earlier one.
        self._reads.until = self._began
        return self._tell(FROM_ZERO, 1)

    def _tell(self, how: str, step: int | None, why: str = "") -> None:
        """Write the event. step: the first one of this start, if that is known; why: for people."""
        assert self._earlier is not None  # else nobody looks
        before, self._how = self._earlier.before, how
        lost = before if how == FROM_ZERO else None
        if how == FROM_ZERO:
            steps = "1 step is" if lost == 1 else f"{lost} steps are"
            text = f"the script started again from step 1: at least {steps} lost"
        elif how == UNKNOWN:
            text = f"unknown whether the script went on or started again from step 1: {why}"
        elif step is None:
            text = "the script went on at an unknown step: its steps are counted from there"
        else:
            text = f"the script went on at step {step}"
        self._events.write(
            "restarted", how=how, step=step, before=before, best=self._earlier.best, lost=lost, text=text
        )


def _earlier(path: Path, progress: int) -> Earlier | None:
    """Return what is known of earlier starts; None without one. This start has written its `rank_started` already."""
    found = list(_told(path, "rank_started", "first_step", "restarted"))
    begun = [float(event["time"]) for event in found if event["event"] == "rank_started"]
    if len(begun) < 2:
        return None
    seen = [event.get("step") for event in found if event["event"] == "first_step"]
    before = next((step for step in reversed(seen) if isinstance(step, int)), None)
    if before is not None:
        before = max(before, progress)
    best = [step for event in found if isinstance(step := event.get("best"), int)]
    return Earlier(min(begun), before, None if before is None else max([before, *best]))


def _loaded(path: Path) -> int | None:
    """Return the step of the checkpoint that slurmddp's library has loaded in this start."""
    found = list(_told(path, "rank_started", "resumed"))
    step = found[-1].get("step") if found and found[-1]["event"] == "resumed" else None
    return step if isinstance(step, int) else None


def _told(path: Path, *names: str) -> Iterator[Mapping[str, Any]]:
    """Yield the events of these names. A line that is no event is left out, and a file that cannot be read is empty."""
    words = [f'"{name}"'.encode() for name in names]
    with contextlib.suppress(OSError), path.open("rb") as file:
        for line in file:
            if any(word in line for word in words):
                with contextlib.suppress(ValueError, TypeError, KeyError):
                    event = json.loads(line)
                    if event["event"] in names and isinstance(event["time"], int | float):
                        yield event
