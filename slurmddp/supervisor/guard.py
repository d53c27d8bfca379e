"""Requeues the job if job.sh cannot. It runs beside job.sh or, in a job that may lose nodes, on each node.

- Something kills job.sh (SIGKILL, as where the node is out of memory): Slurm ends the job.
- The node of job.sh is lost: Slurm lets a job that may lose nodes live on without it (--no-kill), an allocation that
  nobody uses.
"""

import os
import signal
import time
from typing import Any, Callable, Optional, Sequence

from slurmddp.causes.rules import rules
from slurmddp.records import events
from slurmddp.records.cause import Cause
from slurmddp.records.job_events import AttemptEnded, JobEnded, JobStarted, NodeExcluded, Requeued
from slurmddp.records.signed import Key
from slurmddp.supervisor import values
from slurmddp.supervisor.attempt import decide_by
from slurmddp.supervisor.brain.ledger import hours_are_used, hours_text
from slurmddp.supervisor.brain.stopping import CONTINUES, NEVER_AGAIN, stopped_alert
from slurmddp.supervisor.brain.types import CANCELLED, DONE, FAILED, KILLED, NEXT, REQUEUE, STOPPED, Facts
from slurmddp.supervisor.folder import PATIENCE, Unavailable
from slurmddp.supervisor.heartbeats import EVERY, Sender
from slurmddp.supervisor.job import Job
from slurmddp.supervisor.order import succeed
from slurmddp.supervisor.scheduler import fields
from slurmddp.supervisor.standby import LOOK, Standby
from slurmddp.supervisor.stopping import KILL_WAIT, put_back
from slurmddp.supervisor.watching import marker_of

rules()  # read by now, like all modules: the run folder may be purged later
#: Seconds between two looks; and for which job.sh's heartbeat stands still until Slurm is asked.
_LOOK, _SILENT = 10.0, 30.0
#: Seconds between two questions, at the most: in an outage, the guards of all nodes of all such jobs ask.
_RARELY = 60.0
#: Seconds in which a guard brings the job back; with what comes before and after it, it takes less than the other: so
#: long, the guard of each further node waits for those before it.
_BACK, _TURN = 60.0, 120.0
LOST_FOR_GOOD = "the job is cancelled: it cannot be requeued"
#: As the shell puts it: 128 + 9.
_KILLED = 137


class Over(Exception):
    """The guard has nothing more to do."""


class Guard:
    """The guard on this node. clock: seconds of a clock that nobody sets."""

    def __init__(self, job: Job, clock: Callable[[], float] = time.monotonic) -> None:
        self.job = job
        self._clock = clock
        self._seen: Any = None
        self._since = clock()
        self._batch_host = ""
        self._pause, self._asked = _LOOK, float("-inf")
        self._began = clock()  # its end, by SIGTERM
        self.standby = Standby(job, clock) if job.values.yes("standby") else None
        self.leads = False

    def run(self) -> None:
        """Watch until the job ends."""
        job = self.job
        job.loop.on_signal(signal.SIGTERM, self.terminated)
        job.loop.on_signal(signal.SIGINT, self.leave)
        if job.values.folder and os.path.isdir(job.values.folder):  # on job.sh's node: it may count on this guard now
            with open(os.path.join(job.values.folder, "guard"), "w"):
                pass
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))  # see __main__.py
        try:
            if job.values.yes("heartbeats"):
                self.send_heartbeats()
            while True:
                job.loop.rest(LOOK if self.standby and self.standby.is_candidate else _LOOK)
                if self.standby:
                    self.succeed(self.standby)
                if job.values.yes("elastic") and self.silent() and self.may_ask():
                    self.look_for_job()
        except Over:
            pass

    def succeed(self, standby: Standby) -> None:
        """Go on as the supervisor if the leader is lost."""
        lost = standby.lost()
        if standby.is_over():
            raise Over
        if lost and standby.seen and standby.may_succeed() and standby.take():
            self.leads = True
            succeed(self.job, standby.seen.host, self.end_with_script)
            raise Over

    def end_with_script(self) -> None:
        """Handle the SIGTERM of a job that this process leads: if job.sh's node comes back, Slurm may kill job.sh, and
        take its end for the job's.
        """
        if self.script_was_killed():
            self.terminated()

    def send_heartbeats(self) -> None:
        """Send them from now on, if that is possible. The supervisor records the nodes that send none."""
        job = self.job
        try:
            key = Key(bytes.fromhex(job.folder.ask("key", patience=60)))
            job.loop.every(EVERY, Sender(key, job.values.words["heartbeats"], job.scheduler.host).send)
        except (OSError, Unavailable):
            pass

    def leave(self) -> None:
        raise Over

    def terminated(self) -> None:
        """Handle SIGTERM: Slurm sends it at each end of a job, and job.sh at its own."""
        self.job.loop.be_deaf()
        self._began = self._clock()
        if self.script_was_killed():
            self.bring_back()
        raise Over

    # --- job.sh was killed

    def script_was_killed(self) -> bool:
        """Return whether the job ends because something killed job.sh, on this node or that of a leader before it."""
        job = self.job
        newest = job.folder.known({}, "newest", events.names(JobStarted, JobEnded, Requeued))
        event = None if newest is None else events.read(newest)
        if newest is None or (event is not None and not isinstance(event.facts, JobStarted)):
            return False  # a folder that does not answer says nothing
        record = fields(job.scheduler.report())
        if not self.leads and record.get("batch_host") != job.scheduler.host:
            return False
        in_22_05 = record.get("reason") == "JobLaunchFailure" and record.get("exit_code") == "0:9"
        killed = in_22_05 or record.get("raised") == "9"
        return killed and (self.standby is None or self.leads or self.standby.take_here())

    def bring_back(self) -> None:
        """Do what job.sh would do: record the end, and requeue the job. Slurm allows KillWait seconds for it."""
        job = self.job
        job.messages.budget = 4
        self._open()
        marker, stop = marker_of(job.folder.known(None, "marker", job.attempt)), job.stop_file()
        if marker is not None and marker.state == STOPPED and stop is None:
            marker = None  # the ranks got Slurm's SIGTERM, too, and saved: nobody had asked them
        killed = Cause(KILLED, node=job.scheduler.host)
        facts = Facts(job.attempt, _KILLED, job.scheduler.job, marker, stop, noted=killed)
        decision = decide_by(job, facts._replace(saved=job.saved() if stop is not None else None))
        what = CANCELLED if decision.ended_by == CANCELLED else REQUEUE if decision.what == NEXT else decision.what
        cause, kept = killed if what in (CANCELLED, DONE) else decision.cause, decision.not_requeued
        if what == REQUEUE and self._used_up():
            what, kept = STOPPED, self._used_up()
            cause = cause._replace(more=kept)
        ended = AttemptEnded(_KILLED, cause.text, cause.node or job.scheduler.host, cause.rank, what)
        job.event(ended._replace(not_requeued=kept, kind=cause.kind, more=cause.more))
        if what == REQUEUE and not put_back(
            job, cause, decision.ended_by, seconds=KILL_WAIT - (self._clock() - self._began)
        ):
            what = FAILED
        if what == FAILED:
            job.alert("failed", "failed", cause, NEVER_AGAIN + CONTINUES)
        elif what == STOPPED:
            job.send(stopped_alert(cause, kept))
        job.event(JobEnded(_KILLED, "KILL", "FAILED", "RaisedSignal:9", what))
        self._settle(4)

    # --- the node of job.sh was lost

    def silent(self) -> bool:
        """Return whether job.sh's heartbeat has stood still for a while. Nobody compares the clocks of two nodes."""
        seen = self.job.folder.known(None, "heartbeat")
        if seen != self._seen:
            self._seen, self._since = seen, self._clock()
            self._pause, self._asked = _LOOK, float("-inf")
        return self._clock() - self._since > _SILENT

    def may_ask(self) -> bool:
        """Return whether Slurm may be asked again, which then is done: ever more rarely."""
        if self._clock() - self._asked < self._pause:
            return False
        if self._asked > float("-inf"):
            self._pause = min(2 * self._pause, _RARELY)
        self._asked = self._clock()
        return True

    def look_for_job(self) -> None:
        """Bring the job back if it goes on without the node of its batch script. One node does it."""
        job = self.job
        turn = self.orphaned()
        if turn:
            job.loop.rest(_TURN * turn)  # the others act only if the first does not
            turn = self.orphaned()
        if turn is None or (self.standby and not self.standby.take()):
            return
        job.loop.be_deaf()
        job.messages.budget = 8
        self._open()
        if job.cancelled():
            job.event(JobEnded(_KILLED, "KILL", "NODE_FAIL", "", CANCELLED))
            job.scheduler.withdraw()
            self._settle(8)
            raise Over
        cause = Cause("Slurm lost the node, which ran job.sh", node=self._batch_host)
        job.exclude(cause.text, [self._batch_host], NodeExcluded)
        if self._used_up():
            job.event(JobEnded(_KILLED, "KILL", "NODE_FAIL", "", STOPPED))
            job.send(stopped_alert(cause._replace(more=self._used_up()), self._used_up()))
            self._settle(8)
            job.scheduler.withdraw()
        elif not put_back(job, cause, seconds=_BACK):
            job.alert("failed", "failed", cause, LOST_FOR_GOOD)
            self._settle(8)
            job.scheduler.withdraw()
        elif job.settings.requeue_policy == "chain":
            job.scheduler.withdraw()  # its successor waits for its end, and nothing else ends it
        self._settle(8)
        raise Over

    def orphaned(self) -> Optional[int]:
        """Return this node's place among those that are left, if Slurm says that the job goes on without the node of
        its batch script; else None. Raises Over if the job is gone, or if this node is none of its nodes any more:
        Slurm does not tell a node that was cut off.
        """
        scheduler = self.job.scheduler
        report = scheduler.report()
        if "Invalid job id" in report:
            raise Over
        record = fields(report)
        if "state" not in record:
            return None  # nobody answers
        if record["state"] not in ("RUNNING", "SUSPENDED", "COMPLETING"):
            raise Over
        if record["state"] != "RUNNING" or "batch_host" not in record or "nodes" not in record:
            return None
        nodes = scheduler.names(record["nodes"])
        if nodes is None:
            return None
        if scheduler.host not in nodes:
            raise Over
        self._batch_host = record["batch_host"]
        return None if self._batch_host in nodes else nodes.index(scheduler.host)

    # ---

    def _used_up(self) -> str:
        """Return why the run may have no further start: its GPU hours, as job.sh wrote them last; empty if it may."""
        settings, used = self.job.settings, self.job.watch.ledger.gpu_seconds
        return hours_text(settings, used) if hours_are_used(settings, used) else ""

    def _open(self) -> None:
        """Take up what the run's files say now: they may be newer than this process."""
        job = self.job
        job.scheduler.ask()
        job.attempt = job.messages.attempt = job.folder.known(job.attempt, "newest_attempt")
        try:
            job.watch.ledger = job.read_ledger(PATIENCE)
        except Unavailable:
            pass  # what it said when this process began still holds

    def _settle(self, seconds: float) -> None:
        self.job.messages.settle(seconds)
        self.job.folder.settle(seconds)


def main(arguments: Sequence[str]) -> int:
    """Guard the job. arguments: those of the supervisor."""
    try:
        job = Job(values.read(arguments))
    except Unavailable:
        return 1  # the run folder does not answer: the guard could decide nothing
    job.attempt = int(os.environ.get("SLURMDDP_ATTEMPT") or 0)
    Guard(job).run()
    return 0
