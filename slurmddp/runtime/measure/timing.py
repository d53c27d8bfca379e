"""The time of each part of a step, without making any step wait.

Usable in a user's own script, too:

>>> import torch
>>> model, rows = torch.nn.Linear(4, 1), torch.randn(8, 4)
>>> timer = StepTimer()
>>> for step in range(3):
...     timer.begin()
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

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

DATA, FORWARD, BACKWARD, NETWORK = "data", "forward", "backward", "network"
OPTIMIZER, CHECKPOINT, EVALUATION, OTHER = "optimizer", "checkpoint", "evaluation", "other"

#: As they are shown. `data`: waiting for the loader. `backward`: until the last gradient is computed, whatever travels
#: meanwhile. `network`: from there to the end of backward, waiting for the all-reduce; of sharded models, see
#: runtime/parallel/waits.py.
PARTS = (DATA, FORWARD, BACKWARD, NETWORK, OPTIMIZER, CHECKPOINT, EVALUATION, OTHER)

_IN_FLIGHT = 16


@dataclass(frozen=True)
class Window:
    """Steps since the window before. `sums`: seconds by part, parts that never came left out.

    `seconds`: of the whole steps, which is the sum of `sums`.
    """

    steps: int
    seconds: float
    sums: dict[str, float]

    def mean(self, *parts: str) -> float:
        """Return seconds per step of these parts together, or of whole steps without any. 0 if there were no steps."""
        seconds = sum(self.sums.get(part, 0.0) for part in parts) if parts else self.seconds
        return seconds / self.steps if self.steps else 0.0


class Reader:
    """Windows of its own over the steps of a timer: what one reader has read is still new to the others."""

    def __init__(self) -> None:
        self._steps = 0
        self._sums: dict[str, float] = {}

    def add(self, step: dict[str, float]) -> None:
        self._steps += 1
        for part, seconds in step.items():
            self._sums[part] = self._sums.get(part, 0.0) + seconds

    def window(self) -> Window:
        """Return all steps since the last call."""
        steps, sums = self._steps, self._sums
        self._steps, self._sums = 0, {}
        return Window(steps, sum(sums.values()), sums)


class HostClock:
    """time.perf_counter. All points in time can be read at once."""

    def __init__(self) -> None:
        self.stamp: Callable[[], Any] = time.perf_counter

    def ready(self, stamps: list[Any]) -> bool:
        return True

    def seconds(self, earlier: Any, later: Any) -> float:
        return float(later - earlier)

    def release(self, stamps: list[Any]) -> None:
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
        event = self._free.pop() if self._free else self._make()
        event.record()
        return event

    def ready(self, stamps: list[Any]) -> bool:
        """Return whether the device has come past all of them: a query, never a wait."""
        return all(event.query() for event in reversed(stamps))

    def seconds(self, earlier: Any, later: Any) -> float:
        return float(earlier.elapsed_time(later)) / 1000

    def release(self, stamps: list[Any]) -> None:
        """Keep the events for later steps."""
        self._free.extend(stamps)


class StepTimer:
    """Time the parts of each step: call `begin`, `mark` after each part, `end`; then read `window`.

    This costs a few microseconds per step on a CPU. On a GPU, parts are read once the device has finished them, a few
    steps later. If the device is more than 16 steps behind, steps are not timed, so that none has to wait.
    """

    def __init__(self, device: torch.device | str = "cpu", *, clock: HostClock | DeviceClock | None = None) -> None:
        kind = torch.device(device).type
        if clock is None:
            # An event of torch is not typed.
            clock = DeviceClock(lambda: torch.cuda.Event(enable_timing=True)) if kind == "cuda" else HostClock()  # type: ignore[no-untyped-call]
        self._clock = clock
        self._stamp = clock.stamp
        self._running = False
        self._marks: list[tuple[str, Any]] = []
        self._pending: deque[list[tuple[str, Any]]] = deque()
        self._own = Reader()
        self._readers = [self._own]

    def begin(self) -> None:
        """Start a step. A step without `end` is discarded."""
        self._read()
        self._running = len(self._pending) < _IN_FLIGHT
        if not self._running:
            return
        self._marks = [("", self._stamp())]

    def mark(self, part: str) -> None:
        """Add the time since the last mark to `part`. Does nothing outside of a step."""
        if self._running:
            self._marks.append((part, self._stamp()))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time of a `with` block to `name`. The time between the last mark and the block is "other"."""
        self.mark(OTHER)
        try:
            yield
        finally:
            self.mark(name)

    def end(self) -> None:
        """End the step. The time since the last mark is "other"."""
        if not self._running:
            return
        self.mark(OTHER)
        self._running = False
        self._pending.append(self._marks)
        self._read()

    def window(self) -> Window:
        """Return the seconds per part, summed over all steps since the last call that can be read without waiting."""
        self._read()
        return self._own.window()

    def reader(self) -> Reader:
        """Return another reader with windows of its own, from the next step on."""
        reader = Reader()
        self._readers.append(reader)
        return reader

    def _read(self) -> None:
        while self._pending:
            marks = self._pending[0]
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
            for reader in self._readers:
                reader.add(parts)
