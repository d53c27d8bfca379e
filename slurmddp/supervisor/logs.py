"""What the logs of an attempt say, for the supervisor: `folder`'s child process reads them."""

import glob
import json
import os
import re
import shutil
import sys
from typing import Any, Dict, List, Optional, Tuple

from slurmddp.causes.find import find, node_logs
from slurmddp.records.cause import read as read_cause
from slurmddp.records.progress import read_ranks
from slurmddp.records.text import first_line

_UNREACHED = re.compile(r"^srun: error: Task launch for \S* failed on node ([^ :]*): (.*)")
_KILLED = re.compile(r"^srun: error: ([^ :]*): task \d+: Killed")
#: Bytes that are read of a log.
_LAST = 2**20


class Logs:
    """The logs folder of an attempt."""

    def preflight(self, logs: str, nodes: List[str]) -> Dict[str, Any]:
        """Return what the check of the nodes found: the verdict by node (None: there is none), and what nodes said that
        failed before it; nodes that srun could not reach; the warnings.
        """
        folder = os.path.join(logs, "preflight")
        verdict = _lines(os.path.join(folder, "verdict"))
        said: Dict[str, str] = {}
        for line in verdict or []:
            node, _, text = first_line(line).partition(" ")
            if node:
                said.setdefault(node, text)
        return {
            "verdict": None if verdict is None else said,
            "failed": self.failed(logs, nodes),
            "unreached": self.unreached(logs),
            "warnings": _warnings(os.path.join(folder, "warnings.json")),
        }

    def failed(self, logs: str, nodes: List[str]) -> Dict[str, str]:
        """Return what node.sh said on the nodes where it could not start."""
        found = {}
        there = {os.path.basename(path) for path in glob.glob(os.path.join(glob.escape(logs), "preflight", "*.failed"))}
        for node in nodes:
            if node + ".failed" in there:
                text = first_line("\n".join(_lines(os.path.join(logs, "preflight", node + ".failed")) or [""]))
                if text:
                    found[node] = text
        return found

    def unreached(self, logs: str) -> List[Tuple[str, str]]:
        """Return the nodes on which srun could start nothing, and its words. It ended what it had started on others."""
        found: Dict[str, str] = {}
        for line in _lines(os.path.join(logs, "srun.err")) or []:
            match = _UNREACHED.match(line)
            if match:
                found.setdefault(first_line(match.group(1)), first_line(match.group(2)))
        return list(found.items())

    def preflight_again(self, logs: str) -> None:
        """Keep what srun said of the first try, and forget the rest of it."""
        os.rename(os.path.join(logs, "srun.err"), os.path.join(logs, "srun.first.err"))
        for path in glob.glob(os.path.join(glob.escape(logs), "preflight", "*")):
            os.unlink(path)

    def prepare_network(self, logs: str) -> None:
        folder = os.path.join(logs, "network")
        os.makedirs(folder, exist_ok=True)
        verdict = os.path.join(folder, "verdict")
        if os.path.exists(verdict):
            os.unlink(verdict)

    def network(self, logs: str) -> Dict[str, Any]:
        """Return the verdict of the measurement; srun's messages about it are not about the ranks."""
        folder = os.path.join(logs, "network")
        found = {"word": "none", "text": "not measured: see {}".format(folder), "facts": {"result": "none"}, "bad": []}
        for line in _lines(os.path.join(folder, "verdict")) or []:
            kind, _, rest = line.partition(" ")
            if kind == "facts":
                found["facts"] = json.loads(rest)
            elif kind == "bad":
                found["bad"].append(rest.partition(" ")[::2])  # type: ignore[attr-defined]
            elif kind:
                found["word"], found["text"] = kind, rest
        if os.path.exists(os.path.join(logs, "srun.err")):
            os.rename(os.path.join(logs, "srun.err"), os.path.join(folder, "srun.err"))
        return found

    def ended(self, logs: str, chosen: List[str]) -> Dict[str, Any]:
        """Return what the logs say of an attempt that has ended, but for its cause."""
        killed: Optional[str] = None
        for line in _lines(os.path.join(logs, "srun.err")) or []:
            if ": task " in line:  # the first task that ended badly; the others were ended because of it
                match = _KILLED.match(line)
                killed = match.group(1) if match else None
                break
        signalled = 0
        for path in sorted(glob.glob(os.path.join(glob.escape(logs), "*.log"))):
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
        errors = os.path.join(logs, "srun.err")
        known = read_cause(noted) if noted else None
        nodes = read_ranks("\n".join(_lines(os.path.join(logs, "..", "..", "ranks")) or []))
        found = find(node_logs(logs), errors if os.path.exists(errors) else None, nodes, known, tasks_are_ranks=tasks)
        return found.write() if found else None

    def show(self, logs: str) -> None:
        """Copy what srun said into job.log."""
        path = os.path.join(logs, "srun.err")
        if os.path.exists(path):
            with open(path, "rb") as file:
                shutil.copyfileobj(file, sys.stderr.buffer)
            sys.stderr.flush()

    def removed(self, logs: str) -> str:
        """Return what the cleanup found on the nodes, in one line."""
        found = []
        for path in sorted(glob.glob(os.path.join(glob.escape(logs), "sweep", "*"))):
            found += ["{} {}".format(os.path.basename(path), line) for line in _lines(path) or [] if line]
        return first_line("; ".join(found))


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


def _warnings(path: str) -> List[str]:
    try:
        with open(path, "rb") as file:
            found = json.loads(file.read().decode("utf-8"))
    except (OSError, ValueError):
        return []
    return [text for text in found if isinstance(text, str)] if isinstance(found, list) else []
