"""Stopping: how whoever runs the job asks the ranks to save a checkpoint, then exit."""

import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from slurmddp.records.marker import Signal
from slurmddp.records.stop import read

if TYPE_CHECKING:
    from slurmddp.runtime.world import World  # It imports torch: signals have to be taken earlier than that.


class StopFile:
    """Looks for a file at most once in `interval` seconds; once seen, it stays seen.

    One rank a node looks, and the answer travels in the reduction of the losses: a shared file system with
    attribute caching shows the file at different moments on different nodes, and ranks that stopped at
    different steps would wait for each other for ever.
    """

    def __init__(self, path: Path | None, *, interval: float = 1.0) -> None:
        self._path = path
        self._interval = interval
        self._next = 0.0
        self._seen = False

    def seen(self) -> bool:
        if self._path is None or self._seen:
            return self._seen
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self._interval
            self._seen = self._path.exists()
        return self._seen

    def reason(self) -> str:
        """Return the file's reason, where it can be read and has one; else that it appeared."""
        try:
            text = self._path.read_text(encoding="utf-8", errors="replace") if self._path else ""
        except OSError:
            # It may be gone again: the reason is a comment only.
            text = ""
        return read(text).reason[:500]


class Stop:
    """This rank's wish to stop: from the stop file, a signal, or whoever calls `request`.

    A wish is only a flag. The ranks agree on it in a reduction that happens anyway, so that all of them stop at
    the same step; the loop saves, never a signal's handler.
    """

    def __init__(self, path: Path | None, *, interval: float = 1.0) -> None:
        """`path`: the stop file, on the one rank of a node that looks for it; None on the others."""
        self._file = StopFile(path, interval=interval)
        self._asked: str | None = None
        self._signal: Signal | None = None
        #: After `agreed_reason`, on every rank: the signal that was the reason, and the rank and node that got it.
        self.signal: Signal | None = None

    def request(self, reason: str) -> None:
        """Ask to stop, from any thread or a signal's handler. The first reason stays."""
        if self._asked is None:
            self._asked = reason

    def request_by_signal(self, number: int, rank: int, node: str) -> None:
        """Ask to stop since this rank got a signal."""
        if self._asked is None:
            name = signal.Signals(number).name
            self._signal = Signal(name, rank, node)
            self.request(f"{name} received by rank {rank} on {node}")

    def wanted(self) -> bool:
        """Return whether this rank wants to stop. Cheap: called in every step."""
        return self._asked is not None or self._file.seen()

    def reason(self) -> str | None:
        if self._asked is not None:
            return self._asked
        return self._file.reason() if self._file.seen() else None

    def agreed(self, world: "World") -> bool:
        """Return whether any rank wants to stop, for places without a reduction: a collective of a millisecond."""
        return any(world.gather(self.wanted()))

    def agreed_reason(self, world: "World") -> str:
        """Return the reason of the first rank that has one, on every rank; every rank has to call it."""
        asked = world.gather((self.reason(), self._signal))
        reason, told = next((each for each in asked if each[0]), ("asked to stop", None))
        self.signal = None if told is None else Signal(*told)  # what is gathered travels as JSON
        return str(reason)
