"""The breaker: a run that fails again and again without getting further is stopped for good. Standard library only.

Three files in the run folder:
- progress: "STEP STEPS", how far the run has come; rank 0 keeps it, or a script of the user's own (the step alone).
- began: the attempt whose ranks started last.
- failures: a line "ATTEMPT STEP" for each start of the ranks that ended by a failure. Rank 0 adds one where torchrun
  has started the ranks anew in the same attempt; job.sh does where a whole attempt has failed. What is not the run's
  fault (a node that was lost, a stop, a preemption) is no line.
"""

import contextlib
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from slurmddp.runtime.watch import marker
from slurmddp.runtime.watch.process_exit import say
from slurmddp.shared.run_folder import RunFolder

#: Set by node.sh: how many starts in a row may end no further than the first of them, and where the step stands.
LIMIT, FILE = "SLURMDDP_NO_PROGRESS", "SLURMDDP_PROGRESS_FILE"
#: Seconds between two writes of the step.
_EVERY = 2.0


class Progress:
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
        text = str(self._step) if self._steps is None else f"{self._step} {self._steps}"
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        with contextlib.suppress(OSError):
            temporary.write_text(f"{text}\n", encoding="ascii")
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
        if _text(began).strip() == str(attempt):
            # Nobody starts ranks twice in an attempt but torchrun, after a failure: a clean end leaves a marker.
            with failed.open("a", encoding="ascii") as file:
                file.write(f"{attempt} {step_of(root, environ)}\n")
        else:
            began.write_text(f"{attempt}\n", encoding="ascii")
    except OSError as error:  # A full disk may have space again before the next save.
        say(f"warning: cannot count the failure of the last start: {error}\n")
    steps = stuck(_text(failed).splitlines(), int(limit))
    if steps is None:
        return None
    why = f"{limit} starts in a row crashed before step {steps + 1}"
    facts = {"state": "no progress", "step": steps, "steps": None, "reason": why, "cause": why, "validation": None}
    marker.write(RunFolder(root).marker(attempt), attempt, facts)
    return why


def note_ranks(root: Path, nodes: Iterable[str]) -> None:
    """Write RUN/ranks, a line a rank: its node. torchrun names a rank that was killed by its place on its node only."""
    with contextlib.suppress(OSError):
        (root / "ranks").write_text("".join(f"{node}\n" for node in nodes), encoding="utf-8")


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


def stuck(lines: Iterable[str], limit: int) -> int | None:
    """Return the step beyond which none of the last `limit` failures got, which is the first one's; None if one did, or
    there are fewer.

    >>> stuck(["0 10", "0 57", "0 50", "1 57"], 3), stuck(["0 10", "0 57", "0 58"], 3), stuck(["0 10"], 3)
    (57, None, None)
    """
    steps = [int(words[1]) for line in lines if len(words := line.split()) == 2 and words[1].isdecimal()]
    last = steps[-limit:]
    return last[0] if len(last) == limit and max(last) <= last[0] else None


def step_of(root: Path, environ: Mapping[str, str]) -> int:
    """Return how far the run has come, as its ranks told; 0 if they did not."""
    words = _text(Path(environ.get(FILE) or RunFolder(root).progress)).split()
    return int(words[0]) if words and words[0].isdecimal() else 0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
