"""The thread that watches over a rank: signals, its parent, progress. It stops nothing that makes progress.

Python runs a signal's handler between two steps of the main thread only, which may be blocked in a collective
whose peer is gone. So signals wake this thread, and it ends the process where the main thread no longer can.
Imports torch only where heartbeats are wanted: signals have to be taken early.
"""

import os
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from slurmddp.runtime.environment import Environment
from slurmddp.runtime.journal import Events
from slurmddp.runtime.watch.own_stacks import OwnStacks
from slurmddp.runtime.watch.process_exit import leave, leave_within, say
from slurmddp.runtime.watch.progress import Patience, Progress
from slurmddp.runtime.watch.stop import Stop

if TYPE_CHECKING:
    from slurmddp.runtime.job import Timeouts
    from slurmddp.runtime.watch.hang import Hang
    from slurmddp.runtime.world import World

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_TICK = 0.25
#: Seconds within which a second SIGTERM is the same one: some send it to all processes, and torchrun passes it on.
ECHO = 3.0
#: Seconds that a rank may be without progress after a SIGTERM: at least, and where its phase is new. torchrun
#: kills 30 s after it.
_AFTER_TERM, _AFTER_TERM_NEW = 5.0, 25.0
#: Seconds to wait for the last exchange of heartbeats.
_UNREACHABLE = 5.0
#: Seconds that saying something may take, before a process ends without.
_LAST_RESORT = 15.0


class Watch:
    """What the loop tells about itself, and the thread that looks at it. Made anew for each process."""

    def __init__(self, env: Environment, stop: Stop, *, over: Callable[[], bool] = lambda: False) -> None:
        """`over`: whether this attempt has ended cleanly, asked while the ranks meet: those that know do not come."""
        self._env, self._over = env, over
        #: Where signals are noted.
        self.stop = stop
        self._name = f"rank {env.rank} on {env.node}"
        self._progress = Progress("join")
        self.enter, self.follow = self._progress.enter, self._progress.follow
        self._patience = Patience(self._progress, shortest=0.0, collective=0.0)
        self._hang: Hang | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._termed_at: float | None = None
        self._since_term = 0.0

    def install(self, *, parent: bool) -> None:
        """Take SIGTERM, SIGUSR1 and SIGUSR2, and start watching; from the main thread only.

        `parent`: the process ends when its parent does, since torchrun's ranks outlive it otherwise.
        """
        reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        for number in SIGNALS:
            # Asking here too is for a main thread that is not blocked: the step after this one knows already.
            signal.signal(number, lambda number, _: self._ask(number))
        started_by = os.getppid() if parent else None
        self._thread = threading.Thread(
            target=self._run, args=(reading, started_by), name="slurmddp watch", daemon=True
        )
        self._thread.start()

    def connect(self, world: "World", timeouts: "Timeouts", events: Events) -> None:
        """Exchange heartbeats from now on, unless `timeouts.hang` is null. Every rank has to call it.

        Failures, such as a port that cannot be reached, are raised on every rank.
        """
        if timeouts.hang is None or self._thread is None:
            return
        patience = Patience(self._progress, shortest=timeouts.hang, collective=timeouts.collective)
        from slurmddp.runtime.watch.hang import Hang

        hang = Hang(world, self._progress, patience, events, self._env)
        self._patience, self._hang = patience, hang

    def count(self, groups: Iterable[Any]) -> None:
        """Also use the collective counts of other process groups to tell waiting ranks from the missing one.

        Such as a mesh's: those in which the main threads of all their ranks issue the same.
        """
        if self._hang is not None:
            self._hang.groups += groups

    def close(self, world: "World") -> None:
        """Watch no more: before the process group ends. Every rank has to call it.

        Signals from here on ask somebody to stop who no longer looks, and so kill nothing.
        """
        if self._hang is not None:
            self._hang.exchange.ended.set()
            self._hang.exchange.join(_UNREACHABLE)
            world.gather(None)  # The store goes with rank 0, when nobody talks to it any more.
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _ask(self, number: int) -> None:
        self.stop.request_by_signal(number, self._env.rank, self._env.node)

    def _run(self, reading: int, parent: int | None) -> None:
        poll = select.poll()
        poll.register(reading, select.POLLIN)
        last = time.monotonic()
        try:
            own_stacks = OwnStacks()
            while not self._closed.is_set():
                woken = poll.poll(_TICK * 1000)
                for number in os.read(reading, 4096) if woken else b"":
                    self._signal(number)
                now = time.monotonic()
                # While this process was suspended, it is late with nothing.
                gone, last = min(now - last, 4 * _TICK), now
                self._look(gone, parent)
                own_stacks.look()
        except Exception:  # noqa: BLE001 - training can do without; but never silently
            say(f"{self._name}: warning: signals and progress are no longer watched:\n{traceback.format_exc()}")

    def _signal(self, number: int) -> None:
        """Called for every signal that has a handler of Python's, also others than ours."""
        if number not in SIGNALS:
            return
        now = time.monotonic()
        if number == signal.SIGTERM:
            if self._progress.state.phase == "join":
                self._end("SIGTERM before the rendezvous: exiting")
            if self._termed_at is not None and now - self._termed_at > ECHO:
                self._end("second SIGTERM: exiting without saving")
            if self._termed_at is None:
                self._termed_at = now
        self._ask(number)

    def _look(self, gone: float, parent: int | None) -> None:
        before = self._patience.waited
        state = self._patience.pass_time(gone)
        if parent is not None and os.getppid() != parent:
            self._end("torchrun has exited: exiting without saving")
        if state.phase == "join":
            if int(self._patience.waited) > int(before) >= 2 and self._over():  # Once a second.
                say(f"{self._name}: this attempt is already over: nothing to do\n")
                leave(0)
            return
        if self._termed_at is not None:
            self._check_after_term(gone, moved=self._patience.waited == 0)
        if self._hang is not None:
            self._hang.look(gone)

    def _check_after_term(self, gone: float, *, moved: bool) -> None:
        """torchrun sends SIGTERM where a peer has died, too; then no step will ever be finished."""
        self._since_term = 0.0 if moved else self._since_term + gone
        phase = self._progress.state.phase
        if phase == "checkpoint":
            return  # It is being saved, which may take its time; gloo notices a peer that is gone.
        known = phase in self._progress.left
        allowed = max(_AFTER_TERM, 2 * self._patience.longest(phase)) if known else _AFTER_TERM_NEW
        if self._since_term > allowed:
            self._end(f"no progress in {phase} for {self._since_term:.0f} s after SIGTERM: exiting without saving")

    def _end(self, message: str) -> None:
        leave_within(_LAST_RESORT, 1)
        say(f"{self._name}: error: {message}\n")
        leave(1)
