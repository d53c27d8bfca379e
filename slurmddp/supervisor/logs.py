"""What the logs of an attempt say, for the supervisor: `folder`'s child process reads them."""

import glob
import json
import os
import re
import shutil
import sys
from typing import Any, Callable, Dict, List, Optional, Tuple

from slurmddp.causes.find import find, node_logs
from slurmddp.records import network, preflight
from slurmddp.records import refusal as refusals
from slurmddp.records.cause import read as read_cause
from slurmddp.records.refusal import Refusal
from slurmddp.records.text import first_line

_UNREACHED = re.compile(r"^srun: error: Task launch for \S* failed on node ([^ :]*): (.*)")
_KILLED = re.compile(r"^srun: error: ([^ :]*): task \d+: Killed")
#: Bytes that are read of a log.
_LAST = 2**20


class Logs:
    """The logs folders of a run's attempts, by their paths."""

    def __init__(self, run: str) -> None:
        self._run = self._at = run

    def path(self, *names: str) -> str:
        return os.path.join(self._at, *names)

    def inside(self, path: str, *names: str) -> str:
        """Return a path below the run folder as `path` does."""
        return self.path(os.path.relpath(path, self._run), *names)

    def listed(self, path: str, *pattern: str) -> List[str]:
        """Return the paths below a folder of the run that have a pattern."""
        return glob.glob(os.path.join(glob.escape(self.inside(path)), *pattern))

    def preflight(self, logs: str, nodes: List[str]) -> Dict[str, Any]:
        """Return what the check of the nodes found: the object of its verdict (None: there is none), what nodes said
        that failed before it, and nodes that srun could not reach.
        """
        verdict = _record(self.inside(logs, "preflight", "verdict.json"), preflight.read)
        return {"verdict": verdict, "failed": self.failed(logs, nodes), "unreached": self.unreached(logs)}

    def failed(self, logs: str, nodes: List[str]) -> Dict[str, Refusal]:
        """Return what node.sh said on the nodes where it could not start."""
        by_node = {}
        there = {os.path.basename(path) for path in self.listed(logs, "preflight", "*.failed")}
        for node in nodes:
            if node + ".failed" in there:
                refusal = refusals.read("\n".join(_lines(self.inside(logs, "preflight", node + ".failed")) or [""]))
                if refusal.text:
                    by_node[node] = refusal
        return by_node

    def unreached(self, logs: str) -> List[Tuple[str, str]]:
        """Return the nodes on which srun could start nothing, and its words. It ended what it had started on others."""
        errors: Dict[str, str] = {}
        for line in _lines(self.inside(logs, "srun.err")) or []:
            match = _UNREACHED.match(line)
            if match:
                errors.setdefault(first_line(match.group(1)), first_line(match.group(2)))
        return list(errors.items())

    def preflight_again(self, logs: str) -> None:
        """Keep what srun said of the first try, and forget the rest of it."""
        os.rename(self.inside(logs, "srun.err"), self.inside(logs, "srun.first.err"))
        for path in self.listed(logs, "preflight", "*"):
            os.unlink(path)

    def prepare_network(self, logs: str) -> None:
        folder = self.inside(logs, "network")
        os.makedirs(folder, exist_ok=True)
        verdict = os.path.join(folder, "verdict.json")
        if os.path.exists(verdict):
            os.unlink(verdict)

    def network(self, logs: str) -> Any:
        """Return the object of the measurement's verdict; None: there is none."""
        folder = self.inside(logs, "network")
        if os.path.exists(self.inside(logs, "srun.err")):  # which is not about the ranks
            os.rename(self.inside(logs, "srun.err"), os.path.join(folder, "srun.err"))
        return _record(os.path.join(folder, "verdict.json"), network.read)

    def ended(self, logs: str, chosen: List[str]) -> Dict[str, Any]:
        """Return what the logs say of an attempt that has ended, but for its cause."""
        killed: Optional[str] = None
        for line in _lines(self.inside(logs, "srun.err")) or []:
            if ": task " in line:  # the first task that ended badly; the others were ended because of it
                match = _KILLED.match(line)
                killed = match.group(1) if match else None
                break
        signalled = 0
        for path in sorted(self.listed(logs, "*.log")):
            lines = _lines(path) or []
            signalled += any("death signal" in line or "got signal: 15" in line for line in lines)
        return {
            "refused": self.failed(logs, chosen),
            "unreached": self.unreached(logs),
            "killed_agents": [killed] if killed else [],
            "signalled": signalled,
        }

    def cause(self, logs: str, noted: Optional[Dict[str, Any]], tasks: bool) -> Optional[Dict[str, Any]]:
        """Return the cause that the logs tell, if it is better than the one that was noted. tasks: launch.mode srun."""
        errors = self.inside(logs, "srun.err")
        known = read_cause(noted) if noted else None
        nodes = _lines(self.path("ranks")) or []
        errors_there = errors if os.path.exists(errors) else None
        cause = find(node_logs(self.inside(logs)), errors_there, nodes, known, tasks_are_ranks=tasks)
        return cause.write() if cause else None

    def show(self, logs: str) -> None:
        """Copy what srun said into job.log."""
        path = self.inside(logs, "srun.err")
        if os.path.exists(path):
            with open(path, "rb") as file:
                shutil.copyfileobj(file, sys.stderr.buffer)
            sys.stderr.flush()

    def removed(self, logs: str) -> str:
        """Return what the cleanup found on the nodes, in one line."""
        removals = []
        for path in sorted(self.listed(logs, "sweep", "*")):
            removals += ["{} {}".format(os.path.basename(path), line) for line in _lines(path) or [] if line]
        return first_line("; ".join(removals))


def _lines(path: str) -> Optional[List[str]]:
    """Return the lines of a file, or of the end of a large one; None where there is none."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _LAST))
            text = file.read(_LAST).decode("utf-8", "replace")
    except (FileNotFoundError, IsADirectoryError):
        return None
    lines = text.split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def _record(path: str, read: Callable[[Any], Any]) -> Any:
    """Return the object of a record; None if there is none, or if it is damaged."""
    try:
        with open(path, "rb") as file:
            return read(json.loads(file.read().decode("utf-8"))).write()
    except (FileNotFoundError, ValueError):
        return None
