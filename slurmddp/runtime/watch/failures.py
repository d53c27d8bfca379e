"""The breaker: a run that fails again and again without getting further is stopped for good. Standard library only.

slurmddp/records/progress.py describes the files `progress` and `failures`. What is not the run's fault (a node that was
lost, a stop, a preemption) is no line of `failures`. The file `began` has the attempt whose ranks started last.
"""

import contextlib
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from slurmddp.records.marker import NO_PROGRESS, Marker
from slurmddp.records.progress import Failure, Progress, ranks_text, read_best, read_failures, read_progress, stuck
from slurmddp.runtime.watch import marker
from slurmddp.runtime.watch.process_exit import say
from slurmddp.shared.files import text_or_empty
from slurmddp.shared.run_folder import RunFolder

#: Set by node.sh: how many starts in a row may end no further than the first of them, and where the step stands.
LIMIT, FILE = "SLURMDDP_NO_PROGRESS", "SLURMDDP_PROGRESS_FILE"
#: Seconds between two writes of the step.
_EVERY = 2.0


class ProgressFile:
    """Tells how far the run has come, at most every 2 s; on rank 0. Losing a write does no harm."""

    def __init__(self, path: Path, steps: int | None = None, *, every: float = _EVERY) -> None:
        """`steps`: how many there are in all, where that is known."""
        self._path = path
        self._steps = steps
        self._every = every
        self._next = 0.0
        self._step: int | None = None
        self._written: int | None = None

    def tell(self, step: int) -> None:
        """So many steps are done."""
        self._step = step
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self._every
            self.flush()

    def flush(self) -> None:
        """Write what is not written yet."""
        if self._step is None or self._step == self._written:
            return
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        with contextlib.suppress(OSError):
            temporary.write_text(Progress(self._step, self._steps).text(), encoding="ascii")
            temporary.replace(self._path)
            self._written = self._step


def begin(root: Path, attempt: int, environ: Mapping[str, str] = os.environ) -> str | None:
    """Rank 0 calls it as the ranks start: notes how the start before it ended, and says why this one must not be.

    None if it may continue, and if job.sh has set no limit. Otherwise, write the marker that ends the attempt.
    """
    limit = environ.get(LIMIT, "")
    if not limit.isdecimal():
        return None
    began, failed = root / "began", root / "failures"
    try:
        if text_or_empty(began).strip() == str(attempt):
            # Nobody starts ranks twice in an attempt but torchrun, after a failure: a clean end leaves a marker.
            with failed.open("a", encoding="ascii") as file:
                file.write(Failure(attempt, max(step_of(root, environ), _best_of(root, environ))).line() + "\n")
        else:
            began.write_text(f"{attempt}\n", encoding="ascii")
    except OSError as error:  # A full disk may have space again before the next save.
        say(f"warning: cannot count the failure of the last start: {error}\n")
    steps = stuck(read_failures(text_or_empty(failed)), int(limit))
    if steps is None:
        return None
    why = f"{limit} starts in a row crashed before step {steps + 1}"
    marker.write(RunFolder(root).marker(attempt), attempt, Marker(NO_PROGRESS, why, why, step=steps))
    return why


def note_ranks(root: Path, nodes: Iterable[str]) -> None:
    """Write RUN/ranks, a line a rank: its node. torchrun names a rank that was killed by its place on its node only."""
    with contextlib.suppress(OSError):
        (root / "ranks").write_text(ranks_text(nodes), encoding="utf-8")


def check() -> None:
    """Before a script of the user's own: raises SystemExit(0) if the attempt is over, or must not continue."""
    root, attempt = os.environ.get("SLURMDDP_RUN"), os.environ.get("SLURMDDP_ATTEMPT", "")
    if not root or not attempt.isdecimal():
        return
    main = os.environ.get("RANK", "0") == "0"
    if marker.ended(RunFolder(Path(root)).marker(int(attempt))):
        why: str | None = f"attempt {attempt} is already over: nothing to do"
    else:
        why = begin(Path(root), int(attempt)) if main else None
    if why is not None:
        if main:
            say(f"slurmddp: {why}\n")
        raise SystemExit(0)


def step_of(root: Path, environ: Mapping[str, str]) -> int:
    """Return how far the run has come, as its ranks told; 0 if they did not."""
    found = read_progress(text_or_empty(Path(environ.get(FILE) or RunFolder(root).progress)))
    return found.step if found else 0


def _best_of(root: Path, environ: Mapping[str, str]) -> int:
    """Return the step of the best start that has ended at its limit; 0 for a script whose steps may count anew."""
    found = read_progress(text_or_empty(Path(environ.get(FILE) or RunFolder(root).progress)))
    return (read_best(text_or_empty(root / "best")) or 0) if found and found.steps is not None else 0
