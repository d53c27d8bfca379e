"""Processes as the machine sees them: pids that cannot be mistaken, and what runs inside a host."""

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from .errors import ClusterError

PROC = Path("/proc")


@dataclass(frozen=True)
class ProcessId:
    """A pid with its start time (clock ticks since boot): together they name one process for ever."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> "ProcessId":
        """The process that has this pid now."""
        return cls(pid, start_time(pid))

    def alive(self) -> bool:
        """True while this very process runs; a zombie does not."""
        try:
            return start_time(self.pid) == self.started and state(self.pid) not in "ZX"
        except (FileNotFoundError, ProcessLookupError):
            return False

    def kill(self, timeout: float = 10) -> None:
        """SIGKILL, and wait until it is gone; no error where it is gone already."""
        if not self.alive():
            return
        os.kill(self.pid, signal.SIGKILL)
        deadline = time.monotonic() + timeout
        while self.alive():
            if time.monotonic() > deadline:
                raise ClusterError(f"process {self.pid} did not die within {timeout:.0f} s of SIGKILL")
            time.sleep(0.01)


def stat_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third (state) on; the second may hold spaces and brackets."""
    return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()


def start_time(pid: int) -> int:
    """When the process started, in clock ticks since boot."""
    return int(stat_fields(pid)[19])


def state(pid: int) -> str:
    """The state letter of a process."""
    return stat_fields(pid)[0]


def descendants(pid: int) -> list[int]:
    """All processes below `pid`, nearest first."""
    parents: dict[int, list[int]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                parents.setdefault(int(stat_fields(int(entry.name))[1]), []).append(int(entry.name))
    found, queue = [], [pid]
    while queue:
        children = parents.get(queue.pop(0), [])
        found += children
        queue += children
    return found


def kill_tree(pid: int) -> None:
    """SIGKILL a process and everything below it."""
    for each in [pid, *descendants(pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def processes_of(init: int, user_id: int | None) -> list[tuple[int, list[str]]]:
    """(pid as the host counts, argv) of what runs in the PID namespace of `init` and in those below it.

    Zombies are left out; user_id None means everyone's.
    """
    found = []
    # The host's own /proc, reached through its init's root: it shows that namespace with its own numbers.
    for entry in (PROC / str(init) / "root" / "proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            status = dict(line.split(":\t", 1) for line in (entry / "status").read_text().splitlines() if ":\t" in line)
            argv = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
            if status["State"][:1] in "ZX" or (user_id is not None and int(status["Uid"].split()[0]) != user_id):
                continue
            found.append((int(entry.name), argv or [status["Name"]]))
    return sorted(found)
