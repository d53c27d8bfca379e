"""Notice that this agent did not run: a SIGSTOP, a debugger, a node that hung. Its ranks went on, or waited for it."""

import threading
import time
from collections.abc import Callable

from slurmddp.records.rank_events import AgentPaused

#: Seconds between two looks at the clock, and those without a look that are worth an event: a busy node takes some.
LOOK, PAUSE = 1.0, 10.0


def start(write: Callable[[AgentPaused], None]) -> None:
    """Watch from now on, in a thread that ends with the process. write: appends the event."""
    threading.Thread(target=_watch, args=(write,), name="slurmddp pauses", daemon=True).start()


def _watch(write: Callable[[AgentPaused], None]) -> None:
    while True:
        before = time.monotonic()
        time.sleep(LOOK)
        missed = time.monotonic() - before - LOOK
        if missed >= PAUSE:
            write(AgentPaused(round(missed, 1)))
