"""The ranks of an attempt on this node, as `slurmddp debug stacks` and `slurmddp check --rehearse` ask for them.

Each rank has memory for its stacks (slurmddp/runtime/watch/own_stacks.py), which grows by "ask": a thread of the rank
answers there. Where none does, because other code keeps the interpreter locked, SIGURG has the kernel interrupt the
rank; a process without a handler ignores it.
"""

import os
import re
import signal
import socket
import sys
import time
from typing import Dict, List, Optional, Sequence

from slurmddp.records import stacks as records

#: Seconds for a thread to answer, for the signal, and between two looks.
_ASKED, _SIGNALLED, _PAUSE = 5.0, 1.0, 0.1
_MEMORY = "/memfd:slurmddp-stacks"


def read(path: str) -> Optional[bytes]:
    """Return a file of /proc; None if it may not be read, or its process is gone."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return None


def environment(pid: int) -> Dict[str, str]:
    """Return the environment of a process; empty if it may not be read."""
    text = (read("/proc/{}/environ".format(pid)) or b"").decode("utf-8", "surrogateescape")
    return dict(line.partition("=")[::2] for line in text.split("\0") if line)


def _status(pid: int, key: str) -> str:
    match = re.search(r"^{}:\s*(\S+)".format(key).encode(), read("/proc/{}/status".format(pid)) or b"", re.MULTILINE)
    return match.group(1).decode() if match else ""


class Rank:
    """A rank's process. how: how it answered: asked, signal, silent; absent: it has no memory for stacks."""

    def __init__(self, pid: int, variables: Dict[str, str]) -> None:
        self.pid = pid
        self.number = int(variables["RANK"])
        world = variables.get("WORLD_SIZE", "")
        self.world = int(world) if world.isdigit() else 0
        self._memory = self._find_memory()
        self._before = self._length()
        self.how = "silent" if self._memory else "absent"

    def _find_memory(self) -> str:
        folder = "/proc/{}/fd".format(self.pid)
        try:
            for name in os.listdir(folder):
                path = os.path.join(folder, name)
                if os.readlink(path).startswith(_MEMORY):
                    return path
        except OSError:
            pass  # it has exited, or has just closed a file
        return ""

    def _length(self) -> int:
        try:
            return os.stat(self._memory).st_size if self._memory else 0
        except OSError:
            return 0

    def ask(self) -> None:
        """Ask for the stacks."""
        try:
            with open(self._memory, "ab") as file:
                file.write(b"ask\n")
        except OSError:
            pass  # it has exited: it stays silent

    def answer(self) -> List[str]:
        """Return the lines that came since the question."""
        text = (read(self._memory) or b"") if self._memory else b""
        return text[self._before :].decode("utf-8", "replace").split("\n")[:-1]

    def has_answered(self) -> bool:
        """Return whether a thread of the rank has answered."""
        if self.how == "silent" and self.answer()[-1:] == ["end"]:
            self.how = "asked"
        return self.how != "silent"

    def interrupt(self) -> None:
        """Have the kernel interrupt it, and wait until its memory has stopped growing."""
        length = last = self._length()
        try:
            os.kill(self.pid, signal.SIGURG)
        except OSError:
            return
        end = time.monotonic() + _SIGNALLED
        while time.monotonic() < end:
            time.sleep(_PAUSE)
            now = self._length()
            if now != length:
                self.how = "signal"
                if now == last:
                    break
            last = now

    def tell(self, host: str) -> List[str]:
        """Return the lines for `slurmddp debug stacks`: what is known of the rank, and its stacks."""
        state = _status(self.pid, "State")
        lines = [records.write(records.Rank(self.number, self.world, self.pid, state, self.how, host))]
        if self.how in ("asked", "signal"):
            stacks = (line for line in self.answer() if line not in ("ask", "end"))
            lines += [records.write(records.Line(self.number, line)) for line in stacks]
        return lines


def ranks_of(attempt: str) -> List[Rank]:
    """Return the ranks of an attempt, by its rendezvous id. The agent has no RANK; data workers have the rank for their
    parent.
    """
    ranks = []
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        variables = environment(pid)
        if variables.get("SLURMDDP_RENDEZVOUS_ID") == attempt and variables.get("RANK", "").isdigit():
            if "RANK" not in environment(int(_status(pid, "PPid") or 0)):
                ranks.append(Rank(pid, variables))
    return ranks


def stacks(attempt: str, host: str) -> None:
    """Print where the ranks are in their Python code."""
    ranks = ranks_of(attempt)
    for rank in ranks:
        rank.ask()
    end = time.monotonic() + _ASKED
    while not all([rank.has_answered() for rank in ranks]) and time.monotonic() < end:  # noqa: C419 - each is looked at
        time.sleep(_PAUSE)
    for rank in ranks:
        if rank.how == "silent":
            rank.interrupt()
    for rank in ranks:
        sys.stdout.write("".join(rank.tell(host)))


def kill(attempt: str, number: int) -> bool:
    """Kill one rank, as a crash would. Return whether it is on this node."""
    ranks = [rank for rank in ranks_of(attempt) if rank.number == number]
    for rank in ranks:
        os.kill(rank.pid, signal.SIGKILL)
    return bool(ranks)


def main(arguments: Sequence[str]) -> int:
    """Do what the words ask for: stacks ATTEMPT, or kill ATTEMPT RANK (exit code 1 if it is not on this node)."""
    action, attempt, *more = arguments
    if action == "kill":
        return 0 if kill(attempt, int(more[0])) else 1
    stacks(attempt, os.environ.get("SLURMD_NODENAME") or socket.gethostname())
    return 0
