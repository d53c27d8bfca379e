"""Where the time of a step goes, part by part, without making any step wait.

For a script of one's own, too:

>>> import torch
>>> model, rows = torch.nn.Linear(4, 1), torch.randn(8, 4)
>>> timer = StepTimer()
>>> for step in range(3):
...     timer.begin(step)
...     with timer.part("forward"):
...         loss = model(rows).square().sum()
...     with timer.part("backward"):
...         loss.backward()
...     timer.end()
>>> window = timer.window()
>>> window.steps, sorted(window.sums)
(3, ['backward', 'forward', 'other'])
>>> abs(sum(window.sums.values()) - window.seconds) < 1e-9
True
"""

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
import torch.distributed as dist

DATA, FORWARD, BACKWARD, OVERLAP, NETWORK = "data", "forward", "backward", "overlap", "network"
OPTIMIZER, CHECKPOINT, EVALUATION, OTHER = "optimizer", "checkpoint", "evaluation", "other"

#: As they are shown. `data`: waiting for the loader. `backward`: until the first bucket of gradients is ready.
#: `overlap`: until the last one is, computing while gradients travel. `network`: from there to the end of
#: backward, waiting for the all-reduce.
PARTS = (DATA, FORWARD, BACKWARD, OVERLAP, NETWORK, OPTIMIZER, CHECKPOINT, EVALUATION, OTHER)

_KEPT = 1024
_IN_FLIGHT = 16


@dataclass(frozen=True)
class Window:
    """Steps since the window before. Seconds; `sums` and `medians` by part, parts that never came left out.

    `seconds`: of the whole steps, which is the sum of `sums`. `medians`: over the steps.
    """

    steps: int
    seconds: float
    sums: dict[str, float]
    medians: dict[str, float]

    def mean(self, *parts: str) -> float:
        """Seconds a step of these parts together; of whole steps without any. 0 for a window without steps."""
        seconds = sum(self.sums.get(part, 0.0) for part in parts) if parts else self.seconds
        return seconds / self.steps if self.steps else 0.0

    def means(self) -> dict[str, float]:
        """Seconds a step by part, in the order of PARTS, then by name."""
        known = [part for part in PARTS if part in self.sums]
        return {part: self.mean(part) for part in [*known, *sorted(set(self.sums) - set(PARTS))]}


class Reader:
    """Windows of its own over the steps of a timer: what one reader has read is still new to the others."""

    def __init__(self) -> None:
        self._steps: deque[dict[str, float]] = deque()
        self._earlier: dict[str, float] = {}
        self._earlier_steps = 0

    def add(self, step: dict[str, float]) -> None:
        """For the timer: the parts of one more step."""
        self._steps.append(step)
        if len(self._steps) > _KEPT:
            for part, seconds in self._steps.popleft().items():
                self._earlier[part] = self._earlier.get(part, 0.0) + seconds
            self._earlier_steps += 1

    def window(self) -> Window:
        """All steps since the last call; medians over the last 1024 of them where there are more."""
        columns: dict[str, list[float]] = {part: [] for part in self._earlier}
        for step in self._steps:
            for part, seconds in step.items():
                columns.setdefault(part, []).append(seconds)
        count = len(self._steps)
        sums = {part: self._earlier.get(part, 0.0) + sum(values) for part, values in columns.items()}
        medians = {
            part: statistics.median(values + [0.0] * (count - len(values))) for part, values in columns.items() if count
        }
        steps = count + self._earlier_steps
        self._steps, self._earlier, self._earlier_steps = deque(), {}, 0
        return Window(steps, sum(sums.values()), sums, medians)


class Clock(Protocol):
    """Points in time that may become readable only later."""

    def stamp(self) -> Any:
        """Now."""
        ...

    def ready(self, stamps: list[Any]) -> bool:
        """Whether all of them can be read without waiting."""
        ...

    def seconds(self, earlier: Any, later: Any) -> float:
        """From one to the other."""
        ...

    def release(self, stamps: list[Any]) -> None:
        """They are not needed any more; one may stand there twice."""
        ...


class HostClock:
    """time.perf_counter."""

    def __init__(self) -> None:
        self.stamp = time.perf_counter

    def ready(self, stamps: list[float]) -> bool:
        """Always."""
        return True

    def seconds(self, earlier: float, later: float) -> float:
        """The difference."""
        return later - earlier

    def release(self, stamps: list[float]) -> None:
        """Nothing to do."""


class DeviceClock:
    """Events on the device's current stream, used again and again.

    They tell how long the device took to get from one to the next: computing, or standing still because the
    host (or another rank) did not feed it. What the host did behind the device's back costs nothing and is
    not counted.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        """`make` gives an event with record(), query() and elapsed_time(later) in milliseconds."""
        self._make = make
        self._free: list[Any] = []

    def stamp(self) -> Any:
        """Record an event."""
        event = self._free.pop() if self._free else self._make()
        event.record()
        return event

    def ready(self, stamps: list[Any]) -> bool:
        """Whether the device has come past all of them: a query, never a wait."""
        return all(event.query() for event in reversed(stamps))

    def seconds(self, earlier: Any, later: Any) -> float:
        """Time on the device."""
        return float(earlier.elapsed_time(later)) / 1000

    def release(self, stamps: list[Any]) -> None:
        """Keep the events for later steps. That of a small model's only bucket stands in two places."""
        self._free.extend({id(event): event for event in stamps}.values())


class StepTimer:
    """Times the parts of each step: `begin`, `mark` after each part, `end`; then `window`.

    Costs a few microseconds a step on a CPU. On a GPU the parts are read when the device has come past them,
    a few steps later; where it falls more than 16 steps behind, steps go untimed rather than wait.
    """

    def __init__(self, device: torch.device | str = "cpu", *, clock: Clock | None = None) -> None:
        kind = torch.device(device).type
        if clock is None:
            clock = DeviceClock(_cuda_event) if kind == "cuda" else HostClock()
        self._clock = clock
        self._stamp = clock.stamp
        self._running = False
        self._number = 0
        self._marks: list[tuple[str, Any]] = []
        self._first_bucket: Any = None
        self._last_bucket: Any = None
        self._pending: deque[tuple[int, list[tuple[str, Any]]]] = deque()
        self._own = Reader()
        self._readers = [self._own]
        #: Number and parts (seconds) of the last step that has been read.
        self.last: tuple[int, dict[str, float]] | None = None
        #: Steps that went untimed because the device was too far behind.
        self.untimed = 0

    def begin(self, step: int) -> None:
        """Start step number `step`. One that was not ended is forgotten."""
        self._read()
        self._running = len(self._pending) < _IN_FLIGHT
        if not self._running:
            self.untimed += 1
            return
        self._number = step
        self._first_bucket = self._last_bucket = None
        self._marks = [("", self._stamp())]

    def mark(self, part: str) -> None:
        """The time since the mark before belongs to `part`; times of one part add up. Nothing outside of a step."""
        if not self._running:
            return
        if self._first_bucket is not None and part == BACKWARD:
            self._marks += [(BACKWARD, self._first_bucket), (OVERLAP, self._last_bucket)]
            self._first_bucket = self._last_bucket = None
            part = NETWORK
        self._marks.append((part, self._stamp()))

    def bucket(self) -> None:
        """A bucket of gradients is ready to be reduced; from whatever thread. `mark("backward")` after it splits
        the backward pass into backward, overlap and network. `watched` calls this.
        """
        if not self._running:
            return
        self._last_bucket = self._stamp()
        if self._first_bucket is None:
            self._first_bucket = self._last_bucket

    def part(self, name: str) -> "Part":
        """A context whose time belongs to `name`; what came before it, since the last mark, is "other"."""
        return Part(self, name)

    def end(self) -> None:
        """End the step: what is left since the last mark is "other"."""
        if not self._running:
            return
        self.mark(OTHER)
        self._running = False
        self._pending.append((self._number, self._marks))
        self._read()

    def window(self) -> Window:
        """Sums and medians by part over the steps since the last call that can be read without waiting."""
        self._read()
        return self._own.window()

    def reader(self) -> Reader:
        """Another reader, whose windows do not depend on who else reads; from the next step on."""
        reader = Reader()
        self._readers.append(reader)
        return reader

    def _read(self) -> None:
        while self._pending:
            number, marks = self._pending[0]
            stamps = [stamp for _, stamp in marks]
            if not self._clock.ready(stamps):
                return
            self._pending.popleft()
            parts: dict[str, float] = {}
            before = stamps[0]
            for part, stamp in marks[1:]:
                parts[part] = parts.get(part, 0.0) + self._clock.seconds(before, stamp)
                before = stamp
            self._clock.release(stamps)
            self.last = (number, parts)
            for reader in self._readers:
                reader.add(parts)


class Part:
    """What `StepTimer.part` gives."""

    def __init__(self, timer: StepTimer, name: str) -> None:
        self._timer, self._name = timer, name

    def __enter__(self) -> None:
        self._timer.mark(OTHER)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.mark(self._name)


#: Annotations of a hook have to be these very classes: torch looks.
if TYPE_CHECKING:
    GradBucket: TypeAlias = Any  # torch's stubs do not export it
else:
    GradBucket = dist.GradBucket

GradientHook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


def watched(timer: StepTimer, hook: GradientHook) -> GradientHook:
    """A hook for DistributedDataParallel.register_comm_hook that tells `timer` of each bucket, then does what
    `hook` does (torch's `allreduce_hook`, say).
    """

    def watched_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        timer.bucket()
        return hook(state, bucket)

    return watched_hook


def _cuda_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
