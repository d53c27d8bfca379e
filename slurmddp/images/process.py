"""Run a long command with its output read live; a signal to stop also ends its children."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from slurmddp.errors import SlurmddpError

#: Seconds between SIGTERM, at which Apptainer removes its temporary folders (internal/pkg/build/build.go,
#: Full), and SIGKILL.
GRACE = 20.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL = 0.2
#: Stops the group $1 as we would if we are killed: nothing but our end closes its input without a line.
_GUARD = 'read -r _ || { kill -s TERM -- "-$1"; sleep "$2"; kill -s KILL -- "-$1"; } 2>/dev/null'


class Stopped(SlurmddpError):
    """The user or the system stopped the work with a signal; the exit code is the shell's for it."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}; no image was changed")
        self.exit_code = 128 + signum


class StopSignals:
    """While it is open, ctrl-C, SIGTERM and SIGHUP end the running command, not this process.

    They are remembered, and `check` raises Stopped, at a place where everything can be cleaned up. Outside
    the main thread, where Python has no signals, it changes nothing. A signal that is ignored (nohup) stays
    ignored.
    """

    def __init__(self, grace: float = GRACE) -> None:
        self.received: int | None = None
        self._grace = grace
        self._child: subprocess.Popen[bytes] | None = None
        self._timer: threading.Timer | None = None
        self._before: dict[signal.Signals, Any] = {}

    def check(self) -> None:
        """Raise Stopped if a signal has come."""
        if self.received is not None:
            raise Stopped(self.received)

    def run(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        line: Callable[[str], None],
        folder: Path | None = None,
        locks: tuple[int, ...] = (),
    ) -> int:
        """Run the command in `folder`, give each line of its two streams to `line` as it comes; return its exit code.

        It gets no input and a process group of its own: the terminal's ctrl-C reaches it through us alone. If this
        process is killed, the group is stopped, too, and holds the open files `locks` until all of it is gone.
        Raises Stopped, after the whole group is gone, and OSError where it cannot be started.
        """
        self.check()
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=dict(environment), cwd=folder, start_new_session=True, pass_fds=locks,
        )  # fmt: skip
        guard = subprocess.Popen(
            ["sh", "-c", _GUARD, "sh", str(child.pid), str(self._grace)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        self._child = child
        try:
            if self.received is not None:  # it came before there was a child to end
                self._end_child()
            for text in _lines(child):
                line(text)
            # Its pid, and its group's, stays taken: no stranger can get our signals
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        except BaseException:
            _signal_group(child, signal.SIGKILL)
            raise
        finally:
            self._child = None
            if self._timer is not None:
                self._timer.cancel()
            if self.received is not None:  # children that outlived it; its pid is not reaped yet, so still ours
                _signal_group(child, signal.SIGKILL)
            guard.communicate(b"\n")
            child.wait()
            assert child.stdout is not None
            child.stdout.close()
        self.check()
        return child.returncode

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for signum in _SIGNALS:
                if signal.getsignal(signum) is not signal.SIG_IGN:
                    self._before[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signum
            self._end_child()
        elif self._child is not None:  # asked twice: at once
            _signal_group(self._child, signal.SIGKILL)

    def _end_child(self) -> None:
        child = self._child
        if child is None:
            return
        _signal_group(child, signal.SIGTERM)
        self._timer = threading.Timer(self._grace, _signal_group, (child, signal.SIGKILL))
        self._timer.daemon = True
        self._timer.start()


def _lines(child: subprocess.Popen[bytes]) -> Iterator[str]:
    """Lines as they come (a carriage return ends one too) until the streams close.

    Or until it has ended and nothing more comes: what it left running may hold them open for ever.
    """
    assert child.stdout is not None
    descriptor = child.stdout.fileno()
    pending = b""
    while True:
        ended = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        if select.select([descriptor], [], [], 0 if ended else _POLL)[0]:
            data = os.read(descriptor, 65536)
            if not data:
                break
            *whole, pending = (pending + data).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
            for part in whole:
                yield part.decode("utf-8", "replace")
        elif ended:
            break
    if pending:
        yield pending.decode("utf-8", "replace")


def _signal_group(child: subprocess.Popen[bytes], signum: int) -> None:
    if child.returncode is not None:
        return
    # All of it may be gone already, or have become another user's
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signum)
