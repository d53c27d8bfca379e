"""The watchdog job of a run. It begins when the run's job has ended, looks at how, and alerts where nobody else could:
nothing ran on the batch host any more, or the job never began.

Arguments: RUN_FOLDER JOB PYTHON OPTION... (of sbatch, for the next one). PYTHON: see shell/python.sh.
"""

import os
import re
import subprocess
import time
from typing import Callable, Dict, Mapping, NamedTuple, Optional, Sequence, Tuple

from slurmddp.records import events, json_lines
from slurmddp.records.alert import Alert
from slurmddp.records.job_events import JobEnded, JobStarted, Requeued, Watchdog
from slurmddp.supervisor.brain.stopping import NEVER_AGAIN
from slurmddp.supervisor.brain.types import REQUEUE
from slurmddp.supervisor.deliver import complain, from_environment
from slurmddp.supervisor.files import Files
from slurmddp.supervisor.notify import send_one
from slurmddp.supervisor.release import REFUSED
from slurmddp.supervisor.requeue import of_the_user
from slurmddp.supervisor.scheduler import fields
from slurmddp.supervisor.values import program

#: Seconds for an answer of Slurm, and for an alert.
_PATIENCE, _BUDGET = 30, 60.0
#: How often Slurm is asked about the job until it answers, and seconds between two questions.
_QUESTIONS, _PAUSE = 5, 30.0
#: States of a job that has not ended, or will start again.
_GOES_ON = re.compile(
    "PENDING|RUNNING|CONFIGURING|COMPLETING|SUSPENDED|STOPPED|RESIZING|SIGNALING|STAGE_OUT|REQUEUED|REQUEUE_.*|"
    "SPECIAL_EXIT|RESV_DEL_HOLD"
)
#: Runs a command without the variables of this job; returns its exit code and output. If it failed: and its errors.
Ask = Callable[[Sequence[str]], Tuple[int, str]]


class Ending(NamedTuple):
    """What is known of the end of the run's job: of Slurm, and of the newest event about it."""

    state: str = ""
    reason: str = ""
    exit_code: str = ""
    node: str = ""
    event: Optional[events.Event] = None


class Watch:
    """The watchdog of a job. me: its own job."""

    def __init__(
        self,
        run: str,
        job: str,
        python: str,
        options: Sequence[str],
        me: str,
        ask: Ask,
        rest: Callable[[float], None] = time.sleep,
    ) -> None:
        self.run, self.job, self.python, self.options, self.me, self._ask = run, job, python, options, me, ask
        self._rest = rest
        self.files = Files(run)

    def look(self) -> Optional[Alert]:
        """Look at how the job has ended. Return the alert that is to be sent, if any."""
        # A chained job is another one, which may have begun by now; one that Slurm requeues keeps its number.
        going_on = self._newest(JobStarted, Requeued)
        end = self.ending()
        state = "{}{}".format(end.state or "unknown to Slurm", end.reason and " ({})".format(end.reason))
        self.say("job {}: {}{}".format(self.job, state, end.exit_code and ", exit code " + end.exit_code))
        if going_on is not None:
            facts = going_on.facts
            next_job = facts.next_job if isinstance(facts, Requeued) else going_on.job_id
            if next_job and next_job != self.job:
                self.wait_for(next_job, end.state)
                return None
        if _GOES_ON.fullmatch(end.state):
            self.wait_for(self.job, end.state)
            return self.held(end) if end.reason == REFUSED else None
        return self.judge(end)

    def held(self, end: Ending) -> Alert:
        """Return the alert about a job that a node refused to start: Slurm holds it until somebody releases it."""
        cause = "a node refused to start job {}, and Slurm holds it".format(self.job)
        self.say("alert: " + cause)
        following = "`scontrol release {}` lets it start".format(self.job)
        return Alert("warning", end.state, cause, following, None, end.node)

    def ending(self) -> Ending:
        """Ask the controller while it remembers the job, else accounting, where the site has it; again if neither
        answers.
        """
        for left in reversed(range(_QUESTIONS)):
            answer = self._ask(["scontrol", "show", "job", self.job, "-o"])[1]
            record = fields(answer)
            if "state" not in record:
                record.update(self._accounted())
            if "state" in record or "invalid job id" in answer.lower() or not left:
                break
            self.say("Slurm did not say how job {} is: {}".format(self.job, " ".join(answer.split()) or "no answer"))
            self._rest(_PAUSE)
        event = self._newest(JobStarted, JobEnded, Requeued)
        node = record.get("batch_host") or (event.node if event else "") or ""
        return Ending(record.get("state", ""), record.get("reason", ""), record.get("exit_code", ""), node, event)

    def _accounted(self) -> Dict[str, str]:
        """Return what accounting knows of the job."""
        words = ["sacct", "--parsable2", "--noheader", "--allocations", "--duplicates", "--jobs=" + self.job]
        lines = self._ask([*words, "--format=State,ExitCode"])[1].strip().split("\n")
        # One record for each time that it was queued; the newest is the last. A state may be "CANCELLED by 1000".
        match = re.match(r"([A-Z_]+)[^|]*\|([0-9:]*)", lines[-1])
        return {"state": match.group(1), "exit_code": match.group(2)} if match else {}

    def judge(self, end: Ending) -> Optional[Alert]:
        """Return the alert about a job that has ended; None if there is nothing to tell."""
        facts = end.event.facts if end.event else None
        # A job that went back into the queue has recorded the exit of its last start only.
        queued = isinstance(facts, JobEnded) and facts.decision == REQUEUE and end.state != "COMPLETED"
        if isinstance(facts, JobEnded) and not queued:
            self.say("job.sh recorded its exit: no alert needed")
            self.event("no alert", end.state)
            return None
        if isinstance(facts, JobStarted):
            message = "job.sh ended without running its traps"
        elif end.state == "CANCELLED":
            self.say("cancelled while pending: no alert needed")
            self.event("no alert", end.state)
            return None
        else:
            message = "the job ended while pending" if end.event else "the job ended before it started"
        cause = self.cause(end, message)
        self.say("alert: " + cause)
        self.event("alerted", end.state)
        following = "{}; slurmddp submit --resume {} continues it".format(NEVER_AGAIN, os.path.basename(self.run))
        attempt = end.event.attempt if end.event else None
        return Alert("failed", end.state or "unknown to Slurm", cause, following, None, end.node, attempt=attempt)

    def cause(self, end: Ending, what: str) -> str:
        """Return what happened, in words."""
        at = "node {}: ".format(end.node) if end.node else ""
        if end.state == "NODE_FAIL":
            return "node {}, which ran job.sh, was lost".format(end.node or "unknown")
        if end.state == "TIMEOUT":
            return "the time limit killed it{}: {}".format(" on node " + end.node if end.node else "", what)
        if end.state == "OUT_OF_MEMORY":
            return "{}out of memory: {}".format(at, what)
        code = ", exit code " + end.exit_code if end.exit_code else ""
        return at + what + code + (", reason " + end.reason if end.reason else "")

    def wait_for(self, job: str, state: str) -> None:
        """Have another watchdog job look when a job has ended: the run goes on in it."""
        log = self.run.replace("%", "%%") + "/logs/watchdog.log"
        words = ["sbatch", "--parsable", *self.options, "--dependency=afterany:" + job, "--begin=now+30"]
        words += ["--open-mode=append", "--output=" + log]
        words += [*program(self.run, self.python, "watchdog"), self.run, job, self.python, *self.options]
        code, answer = self._ask(words)
        if code != 0:
            self.say(
                "job {} continues, but the next watchdog job could not be submitted: {}".format(job, answer.strip())
            )
            self.event("not submitted", state)
            return
        made = answer.strip().split(";")[0]
        self.say("job {} continues: watchdog job {} will check it".format(job, made))
        self.event("waits", state)

    def say(self, text: str) -> None:
        self._written(lambda: self.files.say(time.strftime("%Y-%m-%d %H:%M:%S") + " watchdog: " + text))

    def event(self, outcome: str, state: str) -> None:
        line = events.Event(Watchdog(self.me, outcome, state), time.time(), job_id=self.job).write()
        self._written(lambda: json_lines.append(self.files.path("events.jsonl"), json_lines.dump(line)))

    def _written(self, write: Callable[[], None]) -> None:
        """Write; a disk that is full or cannot be written to must not keep an alert back."""
        try:
            write()
        except OSError as error:
            complain("the watchdog job could not write: {}".format(error))

    def _newest(self, *kinds: type) -> Optional[events.Event]:
        event = self.files.newest(events.names(*kinds))
        return events.read(event) if event else None


def asks(env: Dict[str, str]) -> Ask:
    """Return what runs a command of Slurm in this environment."""

    def ask(words: Sequence[str]) -> Tuple[int, str]:
        try:
            done = subprocess.run(
                words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=_PATIENCE, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return 1, str(error)
        output = done.stdout if done.returncode == 0 else done.stdout + done.stderr
        return done.returncode, output.decode("utf-8", "replace")

    return ask


def main(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> int:
    """Look at the end of the run's job, and alert."""
    run, job, python, *options = arguments
    # What this job was given must not be mistaken for the next job's, or the alert's.
    env = of_the_user(environment)
    alert = Watch(run, job, python, options, environment.get("SLURM_JOB_ID", ""), asks(env)).look()
    if alert is not None:
        send_one(alert, from_environment(run, dict(env, SLURMDDP_JOB_ID=job)), _BUDGET)
    return 0
