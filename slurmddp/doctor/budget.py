"""Processor time for the patterns of one diagnosis: a log may be made of lines that are slow to search."""

from __future__ import annotations

import time

#: Seconds of processor time for all patterns of all logs together.
SECONDS = 4.5
#: What a part of a log may use of the time that is left.
_SHARE = 2 / 3
#: Seconds below which no further log is begun.
_LEAST = 0.02


class Budget:
    """Shares the time out: each log's beginning gets most of what is left, and then its end most of the rest."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self._until: float | None = None
        self._begun = self._share = 0.0

    def begin(self) -> bool:
        """Begin a part of a log; return whether there is time for one."""
        now = time.thread_time()
        if self._until is None:
            self._until = now + self.seconds
        left = self._until - now
        self._begun, self._share = now, now + left * _SHARE
        return left > _LEAST

    def affordable(self, size: int) -> int:
        """Return for how many bytes the next part has time, where this part has spent its share on so many. With a
        margin: the last line counts most."""
        now = time.thread_time()
        left = max((self._until or now) - now, 0)
        return int(size * left * _SHARE / max(now - self._begun, 1e-3) / 2)

    @property
    def spent(self) -> bool:
        """Return whether the part has used up its share."""
        return time.thread_time() > self._share
