"""Forks the ranks of this node from a process that has imported torch (recovery.fork), or says why it does not.

forking_template.py is that process. What the agent gets for a rank looks like the Popen that torchrun expects: the rank
is a child of the agent, as a fresh one is.
"""

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from slurmddp.records.rank_events import NotForked
from slurmddp.runtime import begin
from slurmddp.runtime.environment import CHECKPOINT, START, STORE
from slurmddp.runtime.errors import UserError
from slurmddp.runtime.journal import read_events

#: Set by node.sh for recovery.fork. And, for hooks/sitecustomize.py, the file descriptor of the connection.
WANTED, TEMPLATE = "SLURMDDP_FORK", "SLURMDDP_TEMPLATE"
#: Seconds until torch is imported, which takes minutes on a slow file system, and until a rank is forked.
_IMPORT, _FORK = 600.0, 30.0
_BEGIN = ["-m", "slurmddp.runtime.begin"]
_PR_SET_CHILD_SUBREAPER = 36
#: What differs between ranks and starts: nothing reads these as torch is imported.
_OF_RANK = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    *(START, CHECKPOINT, STORE),
}


class NotPossible(Exception):
    """Ranks cannot be forked; the text says why."""


class ForkedRank:
    """A rank's process, as far as torchrun uses a Popen."""

    def __init__(self, args: Sequence[str], pid: int) -> None:
        self.args, self.pid = args, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return its exit code, below 0 for a signal; None while it runs."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # somebody else has asked for its exit code
                pid, status = self.pid, 1 << 8
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit code. Raises TimeoutExpired."""
        end, pause = None if timeout is None else time.monotonic() + timeout, 0.001
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() >= end:
                raise subprocess.TimeoutExpired([*self.args], timeout or 0)
            time.sleep(pause)
            pause = min(pause * 2, 0.05)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has exited."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Template:
    """The process that is forked."""

    def __init__(
        self, python: Sequence[str], words: Sequence[str], warm: tuple[socket.socket, int] | None = None
    ) -> None:
        """Start it. python: the interpreter with its options; words: of the program, behind `begin`; warm: the
        connection to one that is there already, and its process id.
        """
        self.environment = dict(os.environ)
        self.python, self.words = [*python], [*words]
        self._process: subprocess.Popen[bytes] | ForkedRank
        if warm is None:
            self._connection, other = socket.socketpair()
            variables = begin.with_hooks({**self.environment, TEMPLATE: str(other.fileno())})
            command = [*python, *begin.script_words(words)]
            with other:
                self._process = subprocess.Popen(command, env=variables, pass_fds=[other.fileno()])
        else:
            self._connection, self._process = warm[0], ForkedRank(python, warm[1])
        self._lines = self._connection.makefile("rb")
        self._ready = False

    def fork(self, args: Sequence[str], variables: Mapping[str, str], files: Sequence[int]) -> ForkedRank:
        """Return a rank with these variables, and files for its output. Raises NotPossible."""
        if [*args] != [*self.python, *_BEGIN, *self.words]:
            raise NotPossible("torchrun starts the ranks by another command than this node's first one")
        names = variables.keys() | self.environment.keys()
        changed = {name for name in names if variables.get(name) != self.environment.get(name)} - _OF_RANK
        changed = {name for name in changed if not name.startswith("TORCHELASTIC_")}
        if changed:
            raise NotPossible(f"{', '.join(sorted(changed))} changed since the agent began")
        if not self._ready:
            if why := self._answer(_IMPORT):
                raise NotPossible(why)
            self._ready = True
        with _adopting():
            try:
                socket.send_fds(self._connection, [b" "], files)
                self._connection.sendall(json.dumps(dict(variables)).encode() + b"\n")
            except OSError as error:
                raise NotPossible(self._gone()) from error
            pid = int(self._answer(_FORK))
        if not pid:
            raise NotPossible("no further process may be started (ulimit -u)")
        return ForkedRank(args, pid)

    def _answer(self, limit: float) -> str:
        self._connection.settimeout(limit)
        try:
            line = self._lines.readline()
        except TimeoutError:
            raise NotPossible(f"the process that imports torch did not answer for {limit:.0f} s") from None
        except OSError:
            line = b""
        if not line.endswith(b"\n"):
            raise NotPossible(self._gone())
        return line[:-1].decode()

    def _gone(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        return f"the process that has imported torch has ended (exit code {self._process.returncode})"

    def close(self) -> None:
        """End it; without its agent, it would end by itself."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it may hang in a file system
            self._process.wait(5)
        self._lines.close()
        self._connection.close()


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Become the parent of orphans among the descendants: of a rank, whose parent has exited right after its fork.

    Not for longer: daemons that ranks start would find an unknown parent, and stay as zombies.
    """
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def template(
    words: Sequence[str],
    events: Path,
    write: Callable[[NotForked], None],
    warm: tuple[socket.socket, int] | None = None,
) -> Template | None:
    """Return what this node's ranks are forked from, if the job wants it; where that cannot be, write why.

    It imports torch while this process does. words: torchrun's options and the program; events: events.jsonl; warm: as
    in Template.
    """
    if os.environ.get(WANTED) != "1":
        return None
    try:
        if why := _of_script(events):
            raise NotPossible(why)
        return Template([sys.executable, "-u"], program_of(words), warm)  # as torchrun calls Python
    except (NotPossible, OSError) as error:
        write(NotForked(str(error)))
        return None


def fork_ranks(found: Template, events: Path, write: Callable[[NotForked], None]) -> None:
    """Have torchrun fork this node's ranks; where it cannot be, write why, and change nothing."""
    current = [found]

    def popen(args: Sequence[str], variables: Mapping[str, str], out: IO[str] | None, err: IO[str] | None) -> object:
        if current and variables.get("LOCAL_RANK") == "0" and _of_script(events):  # the rank has told the reason
            current.pop().close()
        if not current:
            return None
        try:
            return current[0].fork(args, variables, [out.fileno() if out else 1, err.fileno() if err else 2])
        except NotPossible as error:
            current.pop().close()
            write(NotForked(str(error)))
            return None

    from slurmddp.runtime import torch_private

    try:
        torch_private.start_ranks_by(popen)
    except UserError as error:
        found.close()
        write(NotForked(str(error)))


def program_of(words: Sequence[str]) -> Sequence[str]:
    """Return the words behind `begin`. Raises NotPossible."""
    if "slurmddp.runtime.wrap" in words:
        raise NotPossible("launch.wrap starts the ranks by a command of its own")
    if _BEGIN[1] not in words:
        raise NotPossible("only scripts of your own are forked, not the bundled tasks")
    program = words[words.index(_BEGIN[1]) + 1 :]
    if program[:1] == ["bash"]:
        raise NotPossible("the ranks are bash scripts")
    return program


def _of_script(events: Path) -> str:
    """Return why the ranks of an earlier start could not stay forks: it is the same in each start."""
    told = [event.facts for event in read_events(events, NotForked) if event.rank is not None]
    return told[-1].why if told and isinstance(told[-1], NotForked) else ""
