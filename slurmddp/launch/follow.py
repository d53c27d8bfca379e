"""Follow the logs of a job in the foreground, and cancel the run when the following ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from slurmddp.launch.cancel import ask_to_stop
from slurmddp.records.job_events import CancelRequested, JobEnded
from slurmddp.run.gate import OwnRun
from slurmddp.run.logs import Follower

#: Seconds between two looks at the logs.
_LOOK_EVERY = 0.2
#: Seconds that ranks have to save where nobody can press Ctrl-C a second time: the default of `timeouts.stop`.
_PATIENCE = 120.0
#: What the first, second and third Ctrl-C do.
_MESSAGES = (
    "run {} was asked to save and exit (Ctrl-C again: stop without waiting)",
    "stopping run {} (Ctrl-C again: kill it)",
    "killing run {}",
)


class Foreground:
    """Starts job.sh, follows its logs, and cancels the run if anything ends the following before the run has ended.

    While it is open, Ctrl-C, SIGHUP and SIGTERM raise nothing: they become requests to the run, whatever line of code
    they interrupt. Open it before the job starts. A signal that is ignored (nohup) stays ignored.
    """

    def __init__(self, folder: OwnRun, say: Callable[[str], None]) -> None:
        self.requests = 0
        self._folder = folder
        self._say = say
        self._said = 0
        self._child: subprocess.Popen[bytes] | None = None
        self._terminate = False
        self._deadline: float | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Foreground:
        for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            if signal.getsignal(signum) is not signal.SIG_IGN:
                self._before[signum] = signal.signal(signum, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._child is not None and self._child.poll() is None:
            self._cancel("the output was closed" if isinstance(error, BrokenPipeError) else repr(error))
        for signum, before in self._before.items():
            signal.signal(signum, before)
        if self.requests > 2 and self._child is not None and self._child.returncode == -signal.SIGKILL:
            self._record_kill()

    def start(self, command: Sequence[str], cwd: str) -> int:
        """Start the command, its output appended to the run's batch log. Returns its process id."""
        with self._folder.job_log.open("ab") as log:
            # A session of its own: the terminal's Ctrl-C reaches the ranks through the stop file only.
            self._child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=cwd, start_new_session=True
            )
        self._act()  # a signal may have come before there was a process
        return self._child.pid

    def follow(self, show: Callable[[bytes], None]) -> int:
        """Show the logs until the job has ended; its exit code, 128 + N if signal N ended it."""
        follower = Follower(self._folder)
        while (code := self._wait()) is None:
            for line in follower.new_lines():
                show(line)
        for line in follower.new_lines(to_the_end=True):
            show(line)
        return code if code >= 0 else 128 - code

    def _on_signal(self, signum: int, _frame: object) -> None:
        """Act at once: the code that was interrupted may be waiting for a reader of our output. `_wait` reports it."""
        if signum != signal.SIGTERM:
            self.requests += 1
        if signum == signal.SIGHUP:
            self._deadline = time.monotonic() + _PATIENCE
        self._terminate |= signum == signal.SIGTERM or self.requests == 2
        self._act()

    def _act(self) -> None:
        """Pass on to the run what was requested and not passed on yet. Never raises."""
        if self._child is None or self._child.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            if self.requests > 2:
                os.killpg(self._child.pid, signal.SIGKILL)
            elif self._terminate:
                self._terminate = False
                self._child.terminate()
            elif self.requests == 1 and not self._folder.stop.exists():
                try:
                    ask_to_stop(self._folder)
                except OSError:  # such as a full disk: SIGTERM asks the ranks for the same
                    self.requests = 2
                    self._child.terminate()

    def _cancel(self, why: str) -> None:
        """Cancel the run after the following failed: it saves and exits, and we wait for that."""
        self.requests = max(self.requests, 1)
        self._deadline = time.monotonic() + _PATIENCE
        self._said = self.requests
        self._tell(f"{why}: cancelling run {self._folder.id}")
        self._act()
        while self._wait() is None:
            pass

    def _record_kill(self) -> None:
        """Write the end of the run for job.sh, which could not: else `status` would call the run lost."""
        self._folder.record(CancelRequested(now=True))
        self._folder.record(JobEnded(137, "KILL", "", "", "cancelled"))

    def _wait(self) -> int | None:
        """Wait a moment for the job: its exit code, or None while it runs."""
        assert self._child is not None
        if self._deadline is not None and time.monotonic() > self._deadline:
            self._deadline, self._terminate = None, True
        self._act()  # again: job.sh removes a stop file that it finds when it begins
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._child.wait(timeout=_LOOK_EVERY)
        if self.requests > self._said:
            self._said = self.requests
            self._tell(_MESSAGES[min(self.requests, 3) - 1].format(self._folder.id))
        return code

    def _tell(self, text: str) -> None:
        with contextlib.suppress(OSError):  # stderr may be what nobody reads
            self._say(text)
