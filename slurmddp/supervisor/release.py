"""Ends Slurm's hold on a requeued job, in a process that has left the job. It stands alone: its text is run by itself.

Slurm holds a requeued job back for two minutes. Its owner may end that, but not before the job's last process has
ended: a node on which one still ends refuses the new start, Slurm drains it, and holds the job for good. (Where cgroups
track processes, this one is ended with the others: the next command on the login node does it.) Nodes that are not to
be used are kept out of the next start in the same way; where that leaves too few, they are not.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

#: How Slurm holds a job that a node has refused to start.
REFUSED = "launch_failed_requeued_held"
#: Seconds between two looks, from the last change that was seen; the least of them after the hold was ended. Many jobs
#: may be requeued at once, and all of them ask the same controller.
STEPS, LATER = (1, 1, 1, 2, 4, 8, 15), 5
#: Seconds after which Slurm ends its hold itself; for which this process looks: the requeue may take its time.
OVER, ALL = 125, 300
#: A hold that has less left when it is first seen is older than this process: the node did not answer meanwhile.
YOUNG = 90


class Request(NamedTuple):
    """job: as scontrol names it. restarts: of the start that is about to end. nodes: those of the job, as Slurm lists
    them; empty: not known. event: to be written to the file `events` then; its time is missing.
    """

    job: str
    restarts: int
    excluded: List[str]
    nodes: str
    events: str
    event: Dict[str, Any]


def ask(*words: str) -> Optional[str]:
    """Return what a command of Slurm writes; None if it fails."""
    done = subprocess.run(["timeout", "10", *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None


def append(path: str, line: str) -> None:
    """Append a line to a file, if its folder is ours: another user may have put one of theirs in its place."""
    folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY)
    try:
        if os.fstat(folder).st_uid != os.geteuid():
            return
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        with open(os.open(os.path.basename(path), flags, 0o666, dir_fd=folder), "a") as file:
            file.write(line)
    finally:
        os.close(folder)


def excluded_in(report: str) -> List[str]:
    """Return the nodes that `scontrol show job` says are kept out of the job."""
    there = re.search(r" ExcNodeList=([A-Za-z0-9]\S*)", report)
    return there.group(1).split(",") if there else []


def nodes_of(text: str, *states: str) -> List[str]:
    """Return the nodes of `scontrol show node -o` in one of these states."""
    node_states = re.findall(r"^NodeName=(\S+).*? State=(\S+)", text, re.MULTILINE)
    return [node for node, state in node_states if {*states} & {*state.replace("*", "+NOT_RESPONDING").split("+")}]


class Free(NamedTuple):
    """yes: no step of a requeued job lives on its old nodes, as far as Slurm knows. silent: those without an answer."""

    yes: bool
    silent: List[str]


def is_free(job: str, nodes: str, ask_slurm: Callable[..., Optional[str]], silent: Sequence[str] = ()) -> Free:
    """Ask about the old nodes of a requeued job, as Slurm lists them; empty: not known. silent: known ones."""
    steps = ask_slurm("squeue", "--steps", "--noheader", "--jobs=" + job, "--format=%i")
    if steps is None or steps.strip():
        return Free(False, list(silent))
    report = ask_slurm("scontrol", "show", "node", nodes, "-o") if nodes else ""
    if report is None:
        return Free(False, list(silent))
    down = nodes_of(report, "DOWN", "NOT_RESPONDING", "FAIL")
    down = [*silent, *(node for node in down if node not in silent)]
    return Free(not set(nodes_of(report, "COMPLETING")) - set(down), down)


def _is_old(report: str) -> bool:
    """Return whether the hold began long before this process: the job's node did not answer, and came back."""
    until = re.search(r" EligibleTime=(\d\S*)", report)
    try:
        return (
            until is not None and time.mktime(time.strptime(until.group(1), "%Y-%m-%dT%H:%M:%S")) - time.time() < YOUNG
        )
    except ValueError:
        return False


class Release:
    """Looks at the job, and does what is due. `over`: nothing is left to do."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.over = self.released = False
        self._old: Optional[bool] = None  # whether the hold began long before this process
        self._held = self._runs = self._refused = 0
        self._seen, self._same = "", 0  # the state, and in how many looks it was the same
        self._silent: List[str] = []

    def pause(self) -> int:
        """Return the seconds until the next look."""
        return max(STEPS[min(self._same, len(STEPS) - 1)], LATER if self.released else 0)

    def look(self, seconds: float) -> None:
        """seconds: since the first look."""
        report = ask("scontrol", "show", "job", self.request.job, "-o") or ""
        started = re.search(r" Restarts=(\d+)", report)
        seen = " ".join(re.findall(r"(?:JobState|Reason|Restarts)=\S+", report)) or self._seen
        self._seen, self._same = seen, self._same + 1 if seen == self._seen else 1
        if re.search("JobState=(COMPLETED|FAILED|CANCELLED|TIMEOUT)", report):
            self.over = True
        elif started is None or int(started.group(1)) <= self.request.restarts:
            return
        elif "JobState=RUNNING" in report:
            self._runs += 1
            self.over = self._runs > 2  # a node may refuse it within seconds
        elif "Reason=" + REFUSED in report:
            self._release_refused(report)
        elif re.search("JobState=PENDING.*Reason=BeginTime", report):
            if self._old is None:  # not before: while its processes still end, the job has the time of its last start
                self._old = _is_old(report)
            self._held += 1
            # Within the second in which it ended the last one, a node refuses a job's new start.
            if self._held > 2 and not self._old and not self.released and self._is_free():
                self._exclude(report)
                self._tell(self._scontrol("update", "JobId=" + self.request.job, "StartTime=now"))
        elif re.search("JobState=PENDING.*Reason=(BadConstraints|ReqNodeNotAvail)", report):
            if (self.request.excluded or self._silent) and (not self._silent or seconds > OVER):
                self.over = self._scontrol("update", "JobId=" + self.request.job, "ExcNodeList=")

    def _release_refused(self, report: str) -> None:
        if self._refused < 2 and self._is_free():
            self._refused += 1
            self._exclude(report)
            self._tell(self._scontrol("release", self.request.job))

    def _is_free(self) -> bool:
        """Return whether the job may start. Nodes that do not answer are kept out of the next start: when one comes
        back, the job's processes there still have to end.
        """
        free, self._silent = is_free(self.request.job, self.request.nodes, ask, self._silent)
        return free

    def _exclude(self, report: str) -> None:
        listed = excluded_in(report)
        more = [node for node in (*self.request.excluded, *self._silent) if node not in listed]
        if more:
            self._scontrol("update", "JobId=" + self.request.job, "ExcNodeList=" + ",".join(more + listed))

    def _scontrol(self, *words: str) -> bool:
        return ask("scontrol", *words) is not None

    def _tell(self, done: bool) -> None:
        """Write the event, once."""
        if done and not self.released:
            line = dict(self.request.event, time=round(time.time(), 3))
            append(self.request.events, json.dumps(line) + "\n")
        self.released = self.released or done


def main(request: Request) -> None:
    """Wait for the hold, some minutes at most, and end it."""
    release, began = Release(request), time.monotonic()
    while not release.over and time.monotonic() - began < ALL:
        time.sleep(release.pause() * random.uniform(1.0, 1.2))
        release.look(time.monotonic() - began)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")
    own_job, own_restarts, own_excluded, own_nodes, own_events, own_event = sys.argv[1:]
    main(Request(own_job, int(own_restarts), own_excluded.split(), own_nodes, own_events, json.loads(own_event)))
