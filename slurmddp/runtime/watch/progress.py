"""What the main thread is doing, and for how long it may. Standard library only."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

#: Phases that are entered again and again, and in which nothing but the ranks themselves is waited for.
QUICK = ("data", "step", "evaluation")
#: Seconds that anything else may take at least before it has been observed: somebody's disk may be slow.
_PATIENT = 1800.0
_TIMES = 5

T = TypeVar("T")


@dataclass(frozen=True)
class State:
    """Where the main thread is. `entries`: how often it has gone from one phase to the next."""

    phase: str
    step: int
    entries: int


class Progress:
    """Kept by the main thread, read by others.

    Phases: join, start, warm-up, data, step, checkpoint, evaluation, end.
    """

    def __init__(self, phase: str = "start") -> None:
        self.state = State(phase, 0, 0)
        #: Phases that have been left at least once.
        self.left: set[str] = set()

    def enter(self, phase: str, step: int | None = None) -> None:
        """Say what the main thread does from here on (step None: the same as before). Takes a microsecond."""
        before = self.state
        self.left.add(before.phase)
        self.state = State(phase, before.step if step is None else step, before.entries + 1)

    def follow(self, items: Iterator[T]) -> Iterator[T]:
        """Yield the same items; while the next one is waited for, the phase is data."""
        while True:
            phase = self.state.phase
            self.enter("data")
            try:
                item = next(items)
            except StopIteration:
                return
            finally:
                self.enter(phase)
            yield item


class Patience:
    """Deadlines learned from what was observed: `shortest`, or five times the longest so far of that phase.

    It gets the time in pieces, and counts only those in which the caller really ran: after a suspended
    job continues, no rank is late.
    """

    def __init__(self, progress: Progress, *, shortest: float, collective: float) -> None:
        """Both in seconds; `collective`: what a collective may take, which has the last word."""
        self._progress = progress
        self._shortest = shortest
        self._collective = collective
        self._longest: dict[str, float] = {}
        self._last = progress.state
        #: Seconds since the main thread went on to another phase.
        self.waited = 0.0

    def pass_time(self, seconds: float) -> State:
        """So much time has gone by. Returns the main thread's state."""
        state = self._progress.state
        if state == self._last:
            self.waited += seconds
            return state
        self._longest[self._last.phase] = max(self.longest(self._last.phase), self.waited)
        self._last, self.waited = state, 0.0
        return state

    def longest(self, phase: str) -> float:
        return self._longest.get(phase, 0.0)

    def deadline(self) -> float:
        """Return how long the present phase may take, in seconds."""
        phase = self._last.phase
        learned = max(self._shortest, _TIMES * self.longest(phase))
        if phase not in QUICK:
            observed = phase == "checkpoint" and phase in self._progress.left
            return max(learned, self._collective, 0.0 if observed else _PATIENT)
        highest = max(self._shortest, self._collective)
        return min(learned, highest) if phase in self._progress.left else highest

    @property
    def over(self) -> bool:
        return self.waited > self.deadline()
