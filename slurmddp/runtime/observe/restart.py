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

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from slurmddp.records.events import of
from slurmddp.records.rank_events import FirstStep, RankStarted, Restarted, Resumed
from slurmddp.runtime.journal import Events, read_events
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
        self._events.write(Restarted(how, step, before, self._earlier.best, lost, text))


def _earlier(path: Path, progress: int) -> Earlier | None:
    """Return what is known of earlier starts; None without one. This start has written its `rank_started` already."""
    events = list(read_events(path, RankStarted, FirstStep, Restarted))
    begun = [event.time for event, _ in of(events, RankStarted) if event.time is not None]
    if len(begun) < 2:
        return None
    seen = [facts.step for _, facts in of(events, FirstStep) if facts.step is not None]
    before = max(seen[-1], progress) if seen else None
    best = [facts.best for _, facts in of(events, Restarted) if facts.best is not None]
    return Earlier(min(begun), before, None if before is None else max([before, *best]))


def _loaded(path: Path) -> int | None:
    """Return the step of the checkpoint that slurmddp's library has loaded in this start."""
    newest = [event.facts for event in read_events(path, RankStarted, Resumed)][-1:]
    return next((facts.step for facts in newest if isinstance(facts, Resumed)), None)
