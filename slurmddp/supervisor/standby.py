"""recovery.standby: where the node of job.sh is lost, a guard goes on as the supervisor, in what is left of the job.

Who leads holds the lease (lease.py), and renews it while it hears another node or Slurm. A leader that was only cut
off, or frozen, finds its lease taken when it wants to write, requeue, alert, start or exit: then it ends the ranks of
its own node, and waits to be killed. It must not exit: Slurm would end the job with job.sh.
"""

import errno
import json
import os
import signal
import socket
import subprocess
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

from slurmddp.records import events
from slurmddp.records.job_events import AttemptEnded, AttemptStarted, JobStarted, NodeExcluded
from slurmddp.supervisor.lease import Lease
from slurmddp.supervisor.scheduler import fields

#: Seconds between two looks and two renewals; without renewal until the leader's kernel is asked, and for its answer;
#: and for which each further node leaves it to those before it.
LOOK, _SILENT, _PROBE, _TURN = 1.0, 3.5, 1.5, 3.0
#: Nodes that may take over, at most: each looks every second.
_CANDIDATES = 3
#: Renewals after which a new leader has guards of its own.
_SETTLED = 60
#: Seconds that a sign of another node holds; between two questions to Slurm at least, where there is none; and that an
#: answer holds, also on the last node, which would ask all the time.
_HEARD, _ASK, _HOLDS, _LAST = 1.0, 5.0, 8.0, 60.0
#: Seconds from the start of a leader until it is cut off, if it hears nobody: its guards have to start.
_FIRST = 60.0
#: Seconds between two looks of a leader that leads no more.
_LATER = 20.0
#: A step's own variables would shape the steps that are started in it: the guard gets those of the batch script beside.
BATCH_ENV = "SLURMDDP_BATCH_ENV"
_OF_STEP = ("SLURM_", "SRUN_")


class Contact:
    """Keeps the lease of this process, which leads, unless this node is cut off. clock: of seconds; nobody sets it."""

    def __init__(self, job: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._job, self._clock = job, clock
        self._until = clock() + _FIRST
        self._renewed = self._asked = float("-inf")
        self._hears = False

    def look(self, hears: bool) -> None:
        """Call this every half second. hears: whether another node was heard just now."""
        now = self._clock()
        if hears:
            self._until = max(self._until, now + _HEARD) if self._hears else now + _HEARD
            self._hears = True
        elif now > self._until - _ASK and now - self._asked >= _ASK:
            self._asked = now
            if self._job.scheduler.ask():
                last = len(self._job.nodes.usable) < 2
                self._until = max(self._until, self._clock() + (_LAST if last else _HOLDS))
        if now - self._renewed >= LOOK:
            self._renewed = now
            self._job.folder.renew()

    def holds(self) -> bool:
        """Return whether this node is not cut off."""
        return self._clock() < self._until


def answers(address: str) -> bool:
    """Return whether the kernel of a node answers: a port where nobody listens is refused."""
    try:
        socket.create_connection((address, 9), _PROBE).close()
    except OSError as error:
        return error.errno in (errno.ECONNREFUSED, errno.ECONNRESET)
    return True


class Standby:
    """Watches the leader, from another node. clock: seconds of a clock that nobody sets."""

    def __init__(self, job: Any, clock: Callable[[], float] = time.monotonic, lives: Any = answers) -> None:
        self._job, self._clock, self._lives = job, clock, lives
        candidates = job.values.words["standby"].split()[1:]
        host = job.scheduler.host
        self._turn = candidates.index(host) * _TURN if host in candidates else None
        self.seen: Optional[Lease] = None
        self._since = clock()
        self._generation: Optional[int] = None
        self._told = False  # whether nodes that live answer here: a firewall may drop what is asked
        self._addresses: Dict[str, str] = {}

    @property
    def is_candidate(self) -> bool:
        return self._turn is not None

    def lost(self) -> bool:
        """Look at the lease. Return whether the leader is lost, and it is this node's turn to take over."""
        seen = self._look()
        if seen is None or seen.host == self._job.scheduler.host or self._turn is None:
            return False  # a folder that does not answer says nothing
        self._generation = seen.generation if self._generation is None else self._generation
        if not self._told or seen.host not in self._addresses:
            self._told = bool(self._answers(seen.host)) or self._told
        late = self._clock() - self._since >= _SILENT + self._turn
        return late and self._told and self._answers(seen.host) is False

    def _look(self) -> Optional[Lease]:
        found = self._job.folder.known(None, "leader")
        seen = Lease(*found) if found else None
        if seen != self.seen or seen is None:
            self.seen, self._since = seen, self._clock()
        return seen

    def is_over(self) -> bool:
        """Return whether a newer leader has guards of its own by now."""
        seen, generation = self.seen, self._generation
        return seen is not None and generation is not None and seen.generation > generation and seen.renewal > _SETTLED

    def may_succeed(self) -> bool:
        """Return whether Slurm still has this node in the job, and the ranks were not on the leader's node alone: these
        may go on, if it is only cut off.
        """
        job, seen = self._job, self.seen
        if seen is None or not job.scheduler.ask() or job.scheduler.job.state != "RUNNING":
            return False
        if job.scheduler.host not in (job.scheduler.nodes() or ()):
            return False
        newest = job.folder.known(None, "newest", events.names(AttemptStarted, JobStarted))
        event = events.read(newest) if newest else None
        facts = event.facts if event else None
        if isinstance(facts, AttemptStarted):
            return set(facts.nodes.split()) != {seen.host}
        return isinstance(facts, JobStarted)

    def take(self) -> bool:
        """Lead from now on, if the lease is still the one that was seen. Raises Unavailable if that is not known."""
        return self.seen is not None and bool(self._job.folder.take_lease(self.seen, self._job.scheduler.host))

    def take_here(self) -> bool:
        """Lead from now on, after a leader of this node that was killed."""
        seen = self._look()
        return seen is not None and seen.host == self._job.scheduler.host and self.take()

    def _answers(self, host: str) -> Optional[bool]:
        """Return whether the kernel of a node answers; None: its address is not known."""
        try:
            if host not in self._addresses:
                self._addresses[host] = socket.gethostbyname(host)
        except OSError:
            return None
        return bool(self._lives(self._addresses[host]))


def candidates(job: Any) -> str:
    """Return the value `standby` for the guards: yes, and the nodes that may take over, in their order."""
    return " ".join(["yes", *[node for node in job.nodes.usable if node != job.scheduler.host][:_CANDIDATES]])


def step_back(job: Any) -> int:
    """Another process leads: end the ranks of this node, and wait for the job's end. Return its exit code, which is
    that of job.sh: Slurm takes the last one.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
    job.folder.superseded = lambda: None
    job.loop.be_deaf()
    if job.child is not None:
        job.child.kill(signal.SIGKILL)  # srun; it reaches no node that counts
    attempt = job.env.get("SLURMDDP_RENDEZVOUS_ID")
    if attempt:
        env = dict(job.env, **job.sweep_environment(attempt, job.logs))
        subprocess.call(["timeout", "60", *job.values.program("sweep")], env=env, stdout=subprocess.DEVNULL)
    while True:
        signal.sigtimedwait((signal.SIGTERM,), _LATER)  # which Slurm sends at the job's end
        record = fields(job.scheduler.report())
        if record.get("state", "RUNNING") not in ("RUNNING", "SUSPENDED"):  # as it is, too, while nobody answers
            return int(record.get("exit_code", "0:0").partition(":")[0])


def batch_environment() -> str:
    """Return what the guard needs of job.sh's environment, or got of it."""
    ours = {name: text for name, text in os.environ.items() if name.startswith(_OF_STEP)}
    return os.environ.get(BATCH_ENV) or json.dumps(ours)


def be_as_job_sh(job: Any) -> None:
    """Have the steps of this process be as those of job.sh."""
    for name in [name for name in job.env if name.startswith(_OF_STEP)]:
        del job.env[name]
    job.env.update(json.loads(job.env.pop(BATCH_ENV)))


def take_up(job: Any) -> Tuple[List[str], Optional[AttemptEnded]]:
    """Read what the job's earlier leaders have recorded. Return the nodes of the newest attempt, and how it ended."""
    nodes: List[str] = []
    ended: Optional[AttemptEnded] = None
    begin = -1
    while begin != job.events_read:
        begin, (job.events_read, lines) = job.events_read, job.folder.ask("new_lines", job.events_read, patience=60)
        for event in filter(None, (events.parse(line.encode("utf-8", "replace")) for line in lines)):
            facts = event.facts
            if isinstance(facts, JobStarted):
                job.nodes.excluded = []
            elif isinstance(facts, NodeExcluded):
                job.nodes.excluded.append(facts.excluded)
            elif isinstance(facts, AttemptStarted):
                nodes, ended = facts.nodes.split(), None
            elif isinstance(facts, AttemptEnded) and event.attempt == job.attempt:
                ended = facts
    return nodes, ended
