"""The thread that watches a script of the user's own, in each of its ranks. Its own failures are logged once, and end
only itself.
"""

import atexit
import json
import os
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slurmddp.runtime import environment
from slurmddp.runtime.environment import Environment
from slurmddp.runtime.errors import UserError
from slurmddp.runtime.journal import Events
from slurmddp.runtime.observe.progress_lines import ProgressLines
from slurmddp.runtime.observe.signs import Steps
from slurmddp.runtime.watch.process_exit import say
from slurmddp.shared.run_folder import RunFolder

#: Seconds between two looks at torch, and that the exit of the script may wait for the last line.
_TICK, _LAST = 0.05, 5.0


@dataclass(frozen=True)
class Settings:
    """What the job asks for: SLURMDDP_OBSERVE, an object of JSON.

    period: seconds between two reports of a rank (None: by the number of ranks).
    """

    period: float | None = None

    def period_of(self, world: int) -> float:
        """Return the seconds between two reports of each rank: all of them write 20 files per second at most."""
        return self.period if self.period is not None else max(10.0, world / 20)


def start(environ: Mapping[str, str] = os.environ) -> None:
    """Watch this process from now on, until it exits. Raises nothing: a script runs as well without it."""
    try:
        known = json.loads(environ["SLURMDDP_OBSERVE"])
        settings = Settings(**{name: known[name] for name in Settings.__annotations__ if name in known})
        observer = Observer(environment.read(environ), settings, RunFolder(Path(environ["SLURMDDP_RUN"])))
        observer.start()
        atexit.register(observer.close)
    except (KeyError, ValueError, TypeError, AttributeError, UserError, OSError, RuntimeError, ImportError) as error:
        say(f"slurmddp: warning: this script is not observed: {type(error).__name__}: {error}\n")


class Observer(threading.Thread):
    """Looks at torch twenty times per second, and reports every few seconds."""

    def __init__(self, env: Environment, settings: Settings, folder: RunFolder) -> None:
        """Counts steps from here on; `start` begins to report them."""
        super().__init__(name="slurmddp observe", daemon=True)
        self._closed = threading.Event()
        self._rank, self._pid = env.rank, os.getpid()
        self._period = settings.period_of(env.world)
        self._steps = Steps()
        events = Events(folder.events, attempt=env.attempt, node=env.node, rank=env.rank)
        self._lines = ProgressLines(folder, env.attempt, events) if env.rank == 0 else None
        self._next = time.monotonic()

    def run(self) -> None:
        """Look until closed."""
        try:
            while not self._closed.wait(_TICK):
                self._look(time.monotonic())
            if self._lines is not None:
                self._lines.report(self._steps.done)
        except Exception:  # noqa: BLE001 - the script must not notice
            say(f"slurmddp: warning: rank {self._rank} is no longer observed:\n{traceback.format_exc()}")
        self._steps.remove()

    def close(self) -> None:
        """Watch no more, before the interpreter goes: a thread inside of torch could not end then."""
        if os.getpid() == self._pid:
            self._closed.set()
            self.join(_LAST)

    def _look(self, now: float) -> None:
        if self._lines is not None:
            self._lines.first(self._steps.done)
        if now >= self._next:
            self._next = now + self._period
            if self._lines is not None:
                self._lines.report(self._steps.done)
