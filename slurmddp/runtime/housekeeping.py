"""Python's garbage collection at the same step on all ranks, instead of whenever one of them feels like it.

A collection takes tens of milliseconds in a process of some size. On one of 64 ranks at a time, it is the other
63 that wait, and at almost every step it is some rank's turn.
"""

import gc
from types import TracebackType


class Collector:
    """Takes over garbage collection until it is closed. `every`: steps between collections; None leaves python its way.

    >>> with Collector(every=100) as collector:
    ...     for step in range(1, 301):
    ...         _ = collector.step(step)
    """

    def __init__(self, every: int | None) -> None:
        self._every = every
        self._was_enabled = gc.isenabled()
        if every is None:
            return
        gc.collect()
        gc.freeze()  # What is here now (modules, the model) mostly stays: no collection needs to walk through it.
        gc.disable()

    def step(self, step: int) -> bool:
        """Call at the end of step number `step` on every rank: whether it collected."""
        if self._every is None or step % self._every:
            return False
        # Young generations only: a full collection walks through everything that lives. Every tenth is full.
        gc.collect(2 if step % (10 * self._every) == 0 else 1)
        return True

    def close(self) -> None:
        """Give garbage collection back to python. A second call does nothing."""
        if self._every is None:
            return
        self._every = None
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()

    def __enter__(self) -> "Collector":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
