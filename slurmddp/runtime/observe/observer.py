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

from slurmddp.records.rehearsal import REQUEST
from slurmddp.runtime import environment
from slurmddp.runtime.environment import Environment
from slurmddp.runtime.errors import UserError
from slurmddp.runtime.journal import Events
from slurmddp.runtime.observe.beats import Beats, Comparison
from slurmddp.runtime.observe.ddp_times import DdpTimes
from slurmddp.runtime.observe.hangs import Hangs, Waiting
from slurmddp.runtime.observe.progress_lines import ProgressLines
from slurmddp.runtime.observe.restart import Restart
from slurmddp.runtime.observe.shares import Reader, Shares, figures, line_seconds
from slurmddp.runtime.observe.signs import ProcessGroup, Steps, on_gpu
from slurmddp.runtime.watch.blame import Beat
from slurmddp.runtime.watch.own_stacks import OwnStacks
from slurmddp.runtime.watch.process_exit import say
from slurmddp.shared.run_folder import RunFolder

#: Seconds between two looks at the main thread, and that the exit of the script may wait for the last line.
_TICK, _LAST = 0.05, 5.0
#: Seconds between two looks at DDP's own times.
_ASKED = 1.0


@dataclass(frozen=True)
class Settings:
    """What the job asks for: SLURMDDP_OBSERVE, an object of JSON.

    hang: the shortest deadline for a sign of progress, in seconds; None: nobody looks. restart: whether a hang ends
    the ranks. period: seconds between two beats of a rank (None: by the number of ranks).
    """

    hang: float | None = None
    restart: bool = False
    period: float | None = None


def start(environ: Mapping[str, str] = os.environ) -> None:
    """Watch this process from now on, until it exits. Raises nothing: a script runs as well without it."""
    try:
        known = json.loads(environ["SLURMDDP_OBSERVE"])
        settings = Settings(**{name: known[name] for name in Settings.__annotations__ if name in known})
        env, folder = environment.read(environ), RunFolder(Path(environ["SLURMDDP_RUN"]))
        if (folder.path / REQUEST).exists():
            from slurmddp.runtime.observe import rehearsal

            rehearsal.start(env, folder)
        observer = Observer(env, settings, folder)
        observer.start()
        atexit.register(observer.close)
    except (KeyError, ValueError, TypeError, AttributeError, UserError, OSError, RuntimeError, ImportError) as error:
        say(f"slurmddp: warning: this script is not observed: {type(error).__name__}: {error}\n")


class Observer(threading.Thread):
    """Looks at the main thread twenty times per second, at torch about once, and reports every few seconds."""

    def __init__(self, env: Environment, settings: Settings, folder: RunFolder) -> None:
        """Counts steps from here on; `start` begins to report them. Raises OSError."""
        super().__init__(name="slurmddp observe", daemon=True)
        self._env, self._pid = env, os.getpid()
        self._closed = threading.Event()
        shortest = float("inf") if settings.hang is None else settings.hang
        # All ranks together write 20 beats per second at most.
        period = max(1.0, min(10.0, shortest / 3), env.world / 20)
        self._period = period if settings.period is None else settings.period
        self._pause = min(self._period, max(1.0, env.world / 100))
        place = folder.observed(env.attempt, env.start)
        self._beats = Beats(place, env.world)
        events = Events(folder.events, attempt=env.attempt, node=env.node, rank=env.rank)
        self._steps = Steps()
        main = threading.main_thread().ident or 0
        self._shares, self._ddp = Shares(main, self._steps), DdpTimes(main)
        self._to_compare, self._of_lines = Reader(self._shares), Reader(self._shares)
        self._waiting = Waiting(self._steps, shortest, patient=not settings.restart)
        silent = 3 * self._period + 3
        self._hangs = Hangs(env, events, self._beats, place, restart=settings.restart, patience=silent)
        self._lines = self._restart = None
        if env.rank == 0:
            self._lines = ProgressLines(folder, env.attempt, events, self._seconds)
            self._restart = Restart(events, folder.events)
        self._comparison, self._group = Comparison(events, env.world), ProcessGroup(events, env.world)
        self._stacks = OwnStacks()
        self._number = 0
        self._looked = self._next = self._asked = time.monotonic()

    def run(self) -> None:
        if self._restart is not None:
            self._restart.ignore_this_thread()
        try:
            while not self._closed.wait(_TICK):
                self._look(time.monotonic())
            self._waiting.pass_time(0)
            self._hangs.close(self._waiting)
            if self._lines is not None:
                self._lines.report(self._steps.done)
                self._look_at_start(last=True)
        except Exception:  # noqa: BLE001 - the script must not notice
            say(f"slurmddp: warning: rank {self._env.rank} is no longer observed:\n{traceback.format_exc()}")
        self._steps.remove()
        self._beats.write(self._env.rank, self._beat(gone=True))

    def close(self) -> None:
        """Watch no more, before the interpreter goes: a thread inside of torch could not end then."""
        if os.getpid() == self._pid:
            self._closed.set()
            self.join(_LAST)

    def _look(self, now: float) -> None:
        self._shares.look()
        self._stacks.look()
        if self._lines is not None:
            self._lines.first(self._steps.done)
            self._look_at_start()
            found = self._ddp.look()
            if found and now >= self._asked + _ASKED:
                self._asked, self._steps.asked = now, self._ddp.read
        if now - self._looked >= self._pause:
            # While this process was suspended, it is late with nothing.
            self._waiting.pass_time(min(now - self._looked, 4 * self._pause))
            self._looked = now
            if self._waiting.late:
                self._hangs.look(self._waiting)
        if now >= self._next:
            self._next = now + self._period
            self._report()

    def _look_at_start(self, *, last: bool = False) -> None:
        self._group.look(self._steps, last=last)
        if self._restart is not None:
            self._restart.look(self._steps, last=last)

    def _report(self) -> None:
        beat = self._beat()
        self._beats.write(self._env.rank, beat)
        if self._lines is not None:
            self._lines.report(self._steps.done)
            beats = self._beats.all()
            self._comparison.add(beats)
            self._hangs.judge(beats, self._waiting)
        else:
            self._hangs.listen()

    def _seconds(self) -> dict[str, float]:
        return line_seconds(self._of_lines.read(), self._ddp.window(), gpu=on_gpu())

    def _beat(self, *, gone: bool = False) -> Beat:
        self._number += 1
        waiting = self._waiting
        return Beat(
            number=self._number,
            node=self._env.node,
            step=waiting.step,
            phase=waiting.phase,
            collectives=waiting.collectives,
            waited=waiting.seconds,
            late=waiting.late and not gone,
            over=waiting.over and not gone,
            gone=gone,
            figures=figures(self._to_compare.read()),
        )
