"""Signals: why the job ends, and whether it starts again after that."""

import os
import signal

from slurmddp.records.cause import Cause
from slurmddp.records.job_events import Requeued
from slurmddp.supervisor.brain import stopping as brain
from slurmddp.supervisor.brain.types import KILLED, TIME_LIMIT
from slurmddp.supervisor.job import Job
from slurmddp.supervisor.requeue import Refused


def ask_to_stop(job: Job, reason: str) -> None:
    """Make the stop file: the ranks see it, save and exit. The first reason stays."""
    if job.stop_file() is not None:
        return
    job.say("{} (stop file): {}".format(brain.asked(job.settings), reason))
    job.folder.known(False, "ask_to_stop", reason)
    if reason.startswith("SIG"):
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
    job.signal = name[len("SIG") :]
    job.messages.budget = 4  # seconds: what Slurm's KillWait leaves, at the least
    job.scheduler.ask()
    if not job.scheduler.slurm:  # nobody but the user sends a signal
        job.scheduler.job = job.scheduler.job._replace(state="CANCELLED")
    why = brain.why_signalled(job.scheduler.job)
    job.count_gpu_time()
    before = job.ledger()
    stop = job.stop_file()
    saved = job.saved() if job.settings.must_save and why == TIME_LIMIT else None
    ending = brain.ending(job.settings, why, before, stop, saved, job.attempt)
    job.ending, job.kept = ending.why, ending.kept
    if ending.withdraw:
        job.scheduler.withdraw()
    state = job.scheduler.job
    job.say("{}: {}{}".format(name, ending.why, " (Slurm: {}, {})".format(*state[:2]) if state.reason else ""))
    ask_to_stop(job, name)
    if job.child is not None:
        job.child.kill(signal.SIGTERM)
    job.keep(before, ending.ledger)
    if ending.back == brain.WAS_BROUGHT:
        job.back = put_back(job, Cause("Slurm or an operator has requeued the job"), by_others=True)
    elif ending.back == brain.ASK:
        job.back = put_back(job, Cause(ending.why), ending.why)
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


def put_back(job: Job, cause: Cause, ended_by: str = "", by_others: bool = False) -> bool:
    """Requeue the job. ended_by: as in Decision. by_others: they have done it. Return whether the run goes on."""
    job.loop.be_deaf()  # Slurm sends SIGTERM to all of the job as soon as it is requeued
    job.requeue.attempt = job.attempt
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
    return True


def resumes(job: Job) -> str:
    """Return what the next start of the ranks does."""
    return "it resumes if the script loads what it saved" if job.settings.own_script else "training resumes"
