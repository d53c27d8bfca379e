"""What all parts of the supervisor share: the job, its run folder, its nodes, and what runs on them now."""

import json
import os
import signal
import time
import zlib
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple

from slurmddp.records import json_lines
from slurmddp.records.cause import Cause
from slurmddp.records.cause import read as read_cause
from slurmddp.records.progress import Progress
from slurmddp.supervisor.brain import ledger as ledgers
from slurmddp.supervisor.brain.types import CANCELLED_BY_USER, FAILED, Alert, Ledger, Moment
from slurmddp.supervisor.brain.watch import Watch
from slurmddp.supervisor.folder import Folder
from slurmddp.supervisor.guarding import Guarding
from slurmddp.supervisor.loop import Child, Loop
from slurmddp.supervisor.messages import Messages
from slurmddp.supervisor.requeue import Chain, Never, Requeue
from slurmddp.supervisor.scheduler import Local, Slurm
from slurmddp.supervisor.values import Values


class Nodes:
    """usable: may be used. chosen: train in this attempt, or are checked for it. excluded: lost, or found bad: not used
    again. suspects: their agent was killed, or Slurm did not reach them: used again only if there are too few others.
    """

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self.usable: List[str] = []
        self.chosen: List[str] = []
        self.excluded: List[str] = []
        self.suspects: List[str] = []

    def renew(self, allocated: Sequence[str]) -> Tuple[str, ...]:
        """Take the nodes that the job has now; return those that it has lost, which are to be excluded."""
        there = set(allocated)
        lost = tuple(node for node in self.usable if node not in there)
        self.usable = without(self.excluded, allocated)
        return lost

    def exclude(self, nodes: Iterable[str]) -> None:
        self.excluded += nodes
        self.usable = without(self.excluded, self.usable)

    def choose(self) -> bool:
        """Choose the first nodes that are not suspect; the others are spares. Return whether they are enough."""
        chosen = without(self.suspects, self.usable)
        if len(chosen) < self._least:
            chosen = list(self.usable)
        self.chosen = chosen[: self._most]
        return len(self.chosen) >= self._least

    @property
    def lost(self) -> List[str]:
        """Return the chosen nodes that were lost since they were chosen."""
        return [node for node in self.chosen if node in self.excluded]

    def enough_without(self, bad: Sequence[str]) -> bool:
        return len(without(bad, self.usable)) >= self._least


def without(unwanted: Iterable[str], nodes: Iterable[str]) -> List[str]:
    """Return the nodes that are not in the first list. There may be thousands."""
    listed = set(unwanted)
    return [node for node in nodes if node not in listed]


#: Seconds between two looks around while something runs on the nodes.
_LOOK = 2.0
#: Seconds after which the GPU hours so far are written down: a job that is killed does not count those since then.
_HOURS_EVERY = 60.0


class Job:
    """The job and its newest attempt.

    ending: why the job is ended from outside; empty if it is not. back: whether it starts again after that. signal:
    the name of the one that it got. kept: why another start would be of no use. gpus: of the allocation. decision,
    cause, ended_by, exit_code: of the newest attempt.
    """

    def __init__(self, values: Values) -> None:
        self.values = values
        self.run = values.run
        self.loop = Loop()
        self.folder = Folder(self.loop, self.run)
        self.settings = values.settings()._replace(rehearsed=self.folder.known(None, "rehearsed"))
        slurm = values.words["scheduler"] == "slurm"
        self.scheduler: Any = Slurm(self.loop) if slurm else Local(values.words["pid"])
        self.env = dict(os.environ, SLURMDDP_RUN=self.run, SLURMDDP_JOB_ID=self.scheduler.job_id)
        self.messages = Messages(self.folder, self.run, self.scheduler.job_id, self.scheduler.host, self.env)
        self.say, self.event, self.alert = self.messages.say, self.messages.event, self.messages.alert
        self.folder.complain = self.say
        self.nodes = Nodes(self.settings.nodes_min, self.settings.nodes_max)
        self.requeue = self._way_back()
        self.guard = Guarding(self)
        self._own = ""  # of the ledger, as it was written last
        end = os.environ.get("SLURM_JOB_END_TIME", "") if slurm else ""
        self._gpu_time_until = self._gpu_time_written = time.monotonic()
        self.watch = Watch(self.settings, self.read_ledger(), float(end) if end.isdigit() else None, self.moment())
        self.step_options = list(values.step_options)
        self.attempt, self.logs = 0, ""
        self.events_read = 0  # bytes of events.jsonl
        self.unended: Sequence[int] = ()  # of earlier starts: see Files.begin
        self.child: Optional[Child] = None
        self.warm: Optional[Child] = None  # the step of warming.py
        self.abort = signal.SIGKILL  # what ends it at once, whatever its nodes answer
        self.ending = self.signal = self.kept = self.ended_by = ""
        self.back = False
        self.gpus = (values.number("gpus_per_node") or 0) * self.settings.nodes_max  # until the nodes are known
        self.decision, self.exit_code = FAILED, 1
        self.cause: Optional[Cause] = None

    def send(self, alert: Optional[Alert]) -> None:
        """Send what the brain wants people to know."""
        if alert is not None:
            self.alert(alert.kind, alert.state, alert.cause, alert.next, alert.text)

    def _way_back(self) -> Any:
        job, policy = self.scheduler, self.settings.requeue_policy
        if policy == "requeue":
            return Requeue(self.loop, job.slurm_job, job.job_id, job.host, self.run)
        if policy == "chain":
            return Chain(self.loop, job.job_id, self.run, self.values.yes("singleton"))
        return Never()

    # --- the attempt

    def open_attempt(self) -> None:
        """Begin the first attempt that has no folder yet, so numbers continue after a requeue. Raises Unavailable."""
        self.name_attempt(*self.folder.ask("open_attempt", self.attempt, patience=60))

    def name_attempt(self, attempt: int, logs: str) -> None:
        """Have what is started belong to this attempt."""
        self.attempt = self.messages.attempt = attempt
        self.logs = logs
        self.env.update(
            SLURMDDP_STARTED=str(int(time.time())),
            SLURMDDP_ATTEMPT=str(self.attempt),
            SLURMDDP_LOGS=self.logs,
            # Two jobs with one id would silently merge.
            SLURMDDP_RENDEZVOUS_ID="{}-{}-{}".format(os.path.basename(self.run), self.scheduler.job_id, self.attempt),
        )

    def stop_file(self) -> Optional[str]:
        """Return the reason in the stop file; None if there is none, or the run folder does not answer."""
        reason: Optional[str] = self.folder.known(None, "stop")
        return reason

    def cancelled(self) -> bool:
        """Return whether the user has cancelled the run: nothing starts it again, whatever ends it."""
        return self.stop_file() == CANCELLED_BY_USER

    def must_end(self) -> bool:
        """Return whether nothing may start on the nodes any more."""
        return bool(self.ending) or self.stop_file() is not None

    def ledger(self) -> Ledger:
        """Return what the starts of the run have come to, as far as the run folder answers."""
        failures, progress, best = self.folder.known(["", "", ""], "ledger")
        known, ledger = self.watch.ledger, ledgers.with_files(self.watch.ledger, failures, progress, best)
        # What could not be written yet counts, too.
        return ledger if len(ledger.failures) >= len(known.failures) else ledger._replace(failures=known.failures)

    def count_gpu_time(self) -> None:
        """Add the time since the last call to the GPU seconds of the run."""
        now, ledger = time.monotonic(), self.watch.ledger
        seconds = ledger.gpu_seconds + self.gpus * (now - self._gpu_time_until)
        self.watch.ledger = ledger._replace(gpu_seconds=seconds)
        self._gpu_time_until = now
        if self.settings.max_gpu_hours is not None and now - self._gpu_time_written >= _HOURS_EVERY:
            self._gpu_time_written = now
            self.keep(self.watch.ledger, self.watch.ledger)

    def keep(self, before: Ledger, after: Ledger) -> None:
        """Write what a decision has added to the ledger."""
        self.watch.ledger = after
        for line in ledgers.lines_to_add(before, after):
            self.folder.tell("append", "failures", line)
        if after.best is not None and after.best != before.best:
            self.folder.tell("write", "best", Progress(after.best).text())
        text = json.dumps(ledgers.own_part(after))
        if text != self._own:
            self.folder.tell("write", "ledger.json", text + "\n")
            self._own = text

    def read_ledger(self, patience: float = 60) -> Ledger:
        """Return what the brain's own file says. Raises Unavailable."""
        # A ledger that was not read must not be written over: then the job does not start.
        text = self.folder.ask("read", "ledger.json", patience=patience)
        ledger = ledgers.read(json_lines.load(text.encode()) or {} if text else {})
        self._own = json.dumps(ledgers.own_part(ledger))
        self._gpu_time_until = self._gpu_time_written = time.monotonic()  # of a guard that waited until now, too
        return ledger

    def exclude(self, reason: str, nodes: Sequence[str], note: Callable[[str, str], Any]) -> None:
        """Never use these nodes in this run again. note: makes the event."""
        for node in nodes:
            self.say("node {} is excluded: {}".format(node, reason))
            self.event(note(node, reason))
        self.nodes.exclude(nodes)

    # --- what runs on the nodes

    def on_nodes(
        self,
        log: str,
        words: List[str],
        look: Callable[[], Any],
        seconds: Optional[int] = None,
        together: bool = False,
        env: Optional[Dict[str, str]] = None,
        last: bool = False,
    ) -> int:
        """Start one process on each chosen node, and wait for them; return the exit code. look: called meanwhile.

        seconds: after which they are terminated. together: if one node fails, the others are ended. last: also where a
        signal ends the job.
        """
        if self.ending and not last:
            return 128 + signal.SIGTERM  # the signal came before there was a child
        self.folder.confirm()
        nodes = self.nodes.chosen
        options = ["--nodelist=" + ",".join(nodes)] if self.values.yes("elastic") else []
        options += ["--cpu-bind=none", *self.step_options, "--kill-on-bad-exit={}".format(int(together))]
        step = self.scheduler.step(nodes, options, log, words)
        if seconds is not None:
            step = ["timeout", "--kill-after=5", str(seconds), *step]
        self.abort = signal.SIGKILL if seconds is None else signal.SIGTERM  # timeout kills srun 5 s later
        if self.scheduler.slurm:
            step = ["bash", "-c", 'exec "$@" 2>>"$0"', self.logs + "/srun.err", *step]
        count = str(len(nodes)) if self.scheduler.slurm else "1"
        self.child = child = self.loop.start(step, dict(self.env, SLURMDDP_NODES=count, **(env or {})))
        while child.code is None:
            look()
            self.loop.run_until(lambda: child.code is not None, _LOOK)
        self.child = None
        if child.code != 0 and not self.ending and self.scheduler.ends_job():
            # This is not the nodes' failure. The job's SIGTERM may come later, or never: Slurm sends one, and while it
            # starts the batch script, nobody gets it. So it is taken for received.
            self.loop.deliver(signal.SIGTERM)
            self.loop.rest(0)
        return child.code

    def sweep_environment(self, attempt: str, logs: str) -> Dict[str, str]:
        """Return what the cleanup of an attempt needs."""
        env = {"SLURMDDP_SWEEP": attempt, "SLURMDDP_SCHEDULER": self.settings.scheduler, "SLURMDDP_LOGS": logs}
        return dict(env, SLURMDDP_NODE_FOLDER=self.values.words["node_folder"])

    def choose_port(self, head: str) -> None:
        """Choose the port on which the agents of an attempt meet: above Linux's ephemeral ports; from job, run and
        attempt, so that those side by side differ; probed, since others may listen.
        """
        seed = "{} {} {}".format(self.scheduler.job_id, self.run, self.attempt)
        port = 61000 + zlib.crc32(seed.encode("utf-8", "surrogateescape")) % 4500
        for _ in range(20):
            if self.loop.run(["bash", "-c", 'exec 3<>"/dev/tcp/$0/$1"', head, str(port)], 2).code != 0:
                break
            port = 61000 + (port - 60999) % 4500
        self.env["SLURMDDP_PORT"] = str(port)

    def find_cause(self, noted: Optional[Cause]) -> Optional[Cause]:
        """Return what the logs say of the attempt, if it is better than what was noted."""
        known, tasks = noted.write() if noted else None, self.values.yes("tasks_per_node")
        cause = self.folder.known(None, "cause", self.logs, known, tasks, patience=60)
        return read_cause(cause) if cause else None

    @property
    def head(self) -> str:
        return str(self.scheduler.head_address or self.nodes.chosen[0])

    # --- for the brain

    def moment(self) -> Moment:
        return Moment(time.monotonic(), time.time())

    def saved(self) -> Optional[bool]:
        """Return whether a file was saved since the job began; None where that is not known."""
        is_saved = self.folder.known(None, "saved", self.settings.checkpoints[1:])
        return None if is_saved is None else bool(is_saved)
