"""Python's garbage collection at the same step on all ranks, instead of whenever one of them feels like it.

A collection takes tens of milliseconds in a process of some size. On one of 64 ranks at a time, it is the other
63 that wait, and at almost every step it is some rank's turn.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def collector(every: int | None) -> Iterator[Callable[[int], bool]]:
    """Take over garbage collection. `every`: steps between collections; None leaves Python its way.

    Gives what each rank calls at the end of a step, with the step's number: whether it collected.

    >>> with collector(every=100) as collect:
    ...     for step in range(1, 301):
    ...         _ = collect(step)
    """
    if every is None:
        yield lambda step: False
        return

    def collect(step: int) -> bool:
        if step % every:
            return False
        # Young generations only: a full collection walks through everything that lives. Every tenth is full.
        gc.collect(2 if step % (10 * every) == 0 else 1)
        return True

    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()  # What is here now (modules, the model) mostly stays: no collection needs to walk through it.
    gc.disable()
    try:
        yield collect
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
