"""Signals: why the job ends, and whether it starts again after that."""

import os
import signal
import time
from typing import Optional

from slurmddp.records.cause import Cause
from slurmddp.records.job_events import Requeued
from slurmddp.supervisor.brain import stopping as brain
from slurmddp.supervisor.brain.types import KILLED, TIME_LIMIT
from slurmddp.supervisor.job import Job
from slurmddp.supervisor.requeue import Refused

#: Seconds from Slurm's SIGTERM to its SIGKILL (KillWait, 30 by default), less some for the last records.
KILL_WAIT = 25.0


def ask_to_stop(job: Job, reason: str, by_signal: bool = False) -> None:
    """Make the stop file: the ranks see it, save and exit. The first reason stays."""
    if job.stop_file() is not None:
        return
    job.say("{} (stop file): {}".format(brain.asked(job.settings), reason))
    job.folder.known(False, "ask_to_stop", reason, by_signal)
    if by_signal:
        return  # what becomes of the job is told when that is known
    job.send(brain.stop_alert(job.settings, reason, job.ledger(), job.saved() if job.settings.must_save else None))


def warned(job: Job) -> None:
    """Slurm sends USR2 before the time limit and, on some sites, before a preemption."""
    job.scheduler.ask()
    ask_to_stop(job, brain.why_warned(job.scheduler.job))


def terminated(job: Job, number: int) -> None:
    """Handle a signal that ends the job. Slurm waits only some seconds (KillWait): requeue and alert at once."""
    if job.ending:
        return  # Slurm sends it to all processes of the job, and job.sh passes its own on
    name = signal.Signals(number).name
    job.signal, began = name[len("SIG") :], time.monotonic()
    job.messages.budget = 4  # seconds: what Slurm's KillWait leaves, at the least
    answered = job.scheduler.ask() or job.scheduler.ask()
    if not job.scheduler.slurm:  # nobody but the user sends a signal
        job.scheduler.job = job.scheduler.job._replace(state="CANCELLED")
    job.count_gpu_time()
    before = job.ledger()
    stop, state = job.stop_file(), job.scheduler.job
    reason = brain.why_signalled(state) if answered else brain.why_unanswered(state, stop)
    saved = job.saved() if job.settings.must_save and reason == TIME_LIMIT else None
    ending = brain.ending(job.settings, reason, before, stop, saved, job.attempt)
    job.ending, job.kept = ending.why, ending.kept
    if ending.withdraw:
        job.scheduler.withdraw()
    slurm = " (Slurm: {}, {})".format(*state[:2]) if state.reason else ""
    job.say("{}: {}{}".format(name, ending.why, slurm if answered else " (assumed: Slurm does not answer)"))
    ask_to_stop(job, name, by_signal=True)
    if job.child is not None:
        job.child.kill(signal.SIGTERM)
    job.keep(before, ending.ledger)
    if ending.back == brain.WAS_BROUGHT:
        job.back = put_back(job, Cause("Slurm or an operator has requeued the job"), by_others=True)
    elif ending.back == brain.ASK:
        left = KILL_WAIT - (time.monotonic() - began)
        job.back = put_back(job, Cause(ending.why), ending.why, seconds=left)
    if not job.back:
        more = "; " + job.kept if job.kept else ""
        job.send(brain.stopped_alert(Cause("{} ({}){}".format(ending.why, name, more)), job.kept))


def orphaned(job: Job) -> None:
    """Something has killed job.sh: Slurm ends the job, and its guard brings it back. Without a guard, nobody does."""
    if job.values.yes("guarded"):
        os._exit(1)  # at once: whatever was done from here on would be done twice
    job.ending = KILLED
    job.messages.budget = 8
    job.say(KILLED)
    if job.child is not None:
        job.child.kill(signal.SIGTERM)
    job.alert("failed", "failed", Cause(KILLED), brain.NEVER_AGAIN)


def put_back(
    job: Job, cause: Cause, ended_by: str = "", by_others: bool = False, seconds: Optional[float] = None
) -> bool:
    """Requeue the job. ended_by: as in Decision. by_others: they have done it. seconds: that are left for it; None: as
    many as it needs. Return whether the run goes on.
    """
    job.loop.be_deaf()  # Slurm sends SIGTERM to all of the job as soon as it is requeued
    job.folder.confirm()
    job.requeue.attempt = job.attempt
    if seconds is not None:
        job.requeue.seconds = seconds
    try:
        excluded = job.nodes.excluded
        again = job.requeue.by_others(excluded) if by_others else job.requeue.again(ended_by, excluded)
    except Refused as error:
        if str(error):
            job.say(str(error))
        return False
    job.say("requeued as job {}: {}".format(again, cause.line()))
    job.event(Requeued(job.settings.requeue_policy, cause.line(), again))
    job.alert("requeued", "requeued", cause, "job {} is in the queue; {}".format(again, resumes(job)))
    failure = "" if by_others else job.requeue.keep_out(excluded)
    if failure:
        job.say(failure)
    return True


def resumes(job: Job) -> str:
    """Return what the next start of the ranks does."""
    return "it resumes if the script loads what it saved" if job.settings.own_script else "training resumes"
