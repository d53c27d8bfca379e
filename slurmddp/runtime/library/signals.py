"""Signals that ask to stop: noted in this process, and not in its children."""

import os
import signal
from types import FrameType
from typing import Any

from slurmddp.runtime.watch.stop import Stop
from slurmddp.runtime.watch.watch import SIGNALS, Watch

#: What to put back when nobody looks any more, by signal.
_before: dict[int, Any] = {}
_hooked = False


def take(watch: Watch) -> None:
    """Let `watch` note the signals, from the main thread only."""
    for number in SIGNALS:
        _before.setdefault(number, signal.getsignal(number))
    _hook()
    watch.install(parent="TORCHELASTIC_RUN_ID" in os.environ)


def note(stop: Stop, rank: int, node: str) -> None:
    """Note those signals that would kill the process; those that the script handles itself are its own.

    Does nothing outside of the main thread, where Python refuses.
    """

    def ask(number: int, frame: FrameType | None) -> None:
        stop.request_by_signal(number, rank, node)

    for number in SIGNALS:
        if number in _before or signal.getsignal(number) is signal.SIG_DFL:
            try:
                before = signal.signal(number, ask)
            except ValueError:
                return
            _before.setdefault(number, before)
    _hook()


def give_back() -> None:
    """Put back what was there before."""
    while _before:
        number, handler = _before.popitem()
        signal.signal(number, handler)
    signal.set_wakeup_fd(-1)


def _hook() -> None:
    global _hooked
    if not _hooked:
        os.register_at_fork(after_in_child=_in_child)
        _hooked = True


def _in_child() -> None:
    """A forked child has our handlers: signals to it would count as ours, and could not end it."""
    if _before:
        signal.set_wakeup_fd(-1)
        for number in _before:
            signal.signal(number, signal.SIG_DFL)
        _before.clear()
