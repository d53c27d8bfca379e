"""A deadline for a whole conversation, which no time-out of a socket is."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def within(seconds: float, call: Callable[[], Result]) -> Result:
    """The call's result, or what it raises; TimeoutError after so many seconds.

    A socket's time-out counts from its last byte: a server that sends one byte at a time, of a header or of a chunk's
    length, would never reach it. So the call has a thread of its own, which is left behind where it is too slow; it
    does not keep the process alive.
    """
    box: queue.SimpleQueue[tuple[Result | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            box.put((call(), None))
        except BaseException as error:  # noqa: BLE001 -- the caller raises it
            box.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        result, error = box.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]
