"""The order of things in a job: its start, its attempts, and its end."""

import os
import signal
import subprocess
import sys
from typing import Any, Callable, Dict, Sequence

from slurmddp.causes.rules import rules
from slurmddp.records.cause import Cause
from slurmddp.records.job_events import JobEnded, JobStarted, NodeExcluded, NoStandby
from slurmddp.records.progress import Failure
from slurmddp.records.signed import Key
from slurmddp.supervisor import values
from slurmddp.supervisor.attempt import Attempts, decide_by
from slurmddp.supervisor.brain.ledger import hours_are_used, hours_text
from slurmddp.supervisor.brain.stopping import NEVER_AGAIN, stopped_alert
from slurmddp.supervisor.brain.types import CANCELLED, DONE, FAILED, NEXT, REQUEUE, STOPPED, Facts
from slurmddp.supervisor.files import keep_others_from_writing
from slurmddp.supervisor.folder import Unavailable
from slurmddp.supervisor.heartbeats import Receiver
from slurmddp.supervisor.job import Job
from slurmddp.supervisor.standby import Contact, be_as_job_sh, step_back, take_up
from slurmddp.supervisor.stopping import ask_to_stop, orphaned, put_back, resumes, terminated, warned
from slurmddp.supervisor.watching import marker_of

#: The exit code where the run folder does not answer at the start, or is another user's: job.sh tells of it.
UNAVAILABLE = 98
rules()  # read by now, like all modules: the run folder may be purged later


def main(arguments: Sequence[str]) -> int:
    """Supervise the job. Return job.sh's exit code, which is also in the file `finished` of its folder on the node."""
    try:
        job = Job(values.read(arguments))
    except Unavailable as error:
        print("job.sh: {}".format(error), file=sys.stderr)
        return UNAVAILABLE
    job.messages.open()
    try:
        _lead(job)
        job.folder.ask("forget_stop", patience=60)
        if job.folder.ask("is_shared"):
            keep_others_from_writing()
        _handle_signals(job)
        job.open_attempt()
    except Unavailable as error:
        job.say(str(error))
        job.folder.settle(10)
        return UNAVAILABLE
    attempts = Attempts(job)
    try:
        if _begin(job):
            _start_guard(job, attempts)
            attempts.make()
            _go_on(job, attempts)
    except Unavailable as error:
        _without_folder(job, attempts, Cause(str(error)))
    job.messages.settle(8)
    _note(job, "told", "")  # if this process is killed from now on, job.sh sends no second alert
    _end(job)
    return job.exit_code


def _lead(job: Job) -> None:
    """Take the lease: where this job began before, that leader's time is over."""
    if job.values.yes("standby"):
        job.folder.superseded = lambda: _superseded(job)
        job.folder.begin_lease(job.scheduler.host)
        _note(job, "leads", "")  # job.sh exits no more unless this node leads


def _superseded(job: Job) -> None:
    code = step_back(job)
    for name, text in (("told", ""), ("finished", "{}\n".format(code))):
        _note(job, name, text)
    os._exit(code)


def succeed(job: Job, lost: str, killed: Callable[[], None]) -> None:
    """Go on with the job, on another node than that of its batch script, which is lost, and end it. killed: called at a
    SIGTERM; it does not return if Slurm has killed that script.
    """
    job.folder.superseded = lambda: _superseded(job)
    job.folder.tell("speak_into_log")
    be_as_job_sh(job)
    _handle_signals(job)

    def signalled() -> None:
        killed()
        terminated(job, signal.SIGTERM)

    job.loop.on_signal(signal.SIGTERM, signalled)
    attempts = Attempts(job)
    job.messages.open()
    try:
        attempt = job.folder.ask("newest_attempt", patience=60)
        job.name_attempt(attempt, "{}/logs/attempt-{:03d}".format(job.run, attempt))
        nodes, ended = take_up(job)
        job.watch.ledger = job.read_ledger()
        job.exclude("it ran job.sh, and is lost", [lost], NodeExcluded)
        _start_guard(job, attempts)
        if ended is None:
            attempts.take_up(nodes, lost)
        else:
            job.decision, job.exit_code = ended.decision, ended.exit_code or 0
        _go_on(job, attempts)
    except Unavailable as error:
        _without_folder(job, attempts, Cause(str(error)))
    job.messages.settle(8)
    _end(job)
    if job.decision != REQUEUE or job.settings.requeue_policy == "chain":
        job.scheduler.complete(job.exit_code)


def _start_guard(job: Job, attempts: Attempts) -> None:
    if job.values.yes("guarded"):
        attempts.list_nodes()
        if job.values.yes("heartbeats"):
            _hear_nodes(job)
        if job.values.yes("standby") and not job.scheduler.library():
            _no_standby(job, "there is no libslurm beside scontrol")
        job.guard.start()


def _no_standby(job: Job, why: str) -> None:
    job.values.words["standby"] = ""
    job.event(NoStandby(why))


def _go_on(job: Job, attempts: Attempts) -> None:
    """Make attempts until the job is over, and tell what becomes of the run."""
    while job.decision == NEXT and not job.ending:
        job.open_attempt()
        attempts.make()
    attempts.end_warm()
    _finish(job, attempts)
    job.loop.be_deaf()


def _note(job: Job, name: str, text: str) -> None:
    """Leave job.sh word, on the node's disk. Without it, job.sh goes by this process's exit code."""
    if not os.path.isdir(job.values.folder):  # on another node
        return
    try:
        with open(os.path.join(job.values.folder, name), "w") as file:
            file.write(text)
    except OSError as error:
        job.say("cannot leave job.sh word: {}".format(error))


def _without_folder(job: Job, attempts: Attempts, cause: Cause) -> None:
    """End a job whose run folder does not answer, or is gone: on another node, or a little later, it may be there.

    This counts as a failed start, like those before it whose end could not be recorded.
    """
    job.exit_code = job.exit_code or 1
    if not job.ending:
        failures = (*job.ledger().failures, *(Failure(job.attempt, step) for step in job.unended))
        job.watch.ledger = job.watch.ledger._replace(failures=failures)
        marker, stop = marker_of(job.folder.known(None, "marker", job.attempt)), job.stop_file()
        saved = job.saved() if stop is not None else None
        facts = Facts(job.attempt, job.exit_code, job.scheduler.job, marker, stop, noted=cause, saved=saved)
        attempts.record(decide_by(job, facts), launched=False)
        job.decision = REQUEUE if job.decision == NEXT else job.decision
    _finish(job, attempts)


def _handle_signals(job: Job) -> None:
    job.loop.on_parents_end(lambda: orphaned(job))
    for number in (signal.SIGTERM, signal.SIGINT):
        job.loop.on_signal(number, lambda number=number: terminated(job, number))  # type: ignore[misc]
    if job.scheduler.slurm:
        job.loop.on_signal(signal.SIGUSR2, lambda: warned(job))
    # What job.sh received before this moment, it has noted; what it receives from now on, it passes on.
    _note(job, "ready", "")
    try:
        with open(job.values.folder + "/signals", encoding="ascii") as file:
            names = file.read().split()
    except FileNotFoundError:
        names = []
    for name in names:
        job.loop.deliver(signal.Signals["SIG" + name])


def _begin(job: Job) -> bool:
    """Tell that the job has started. Return whether it can go on."""
    state: Dict[str, Any] = job.folder.ask("begin", job.attempt, patience=60)
    job.events_read, job.unended, before = state["length"], state["unended"], state["names"]
    job.event(JobStarted(job.scheduler.job_nodes, job.settings.cancel_grace, state["step"]))
    job.say("job {} on {}".format(job.scheduler.job_id, job.scheduler.job_nodes))
    if job.values.yes("counts_gpus"):
        job.gpus = job.scheduler.count_gpus(job.env)
        job.step_options = ["--gpus={}".format(job.gpus), *job.step_options]
        if not job.gpus:
            job.say("Slurm gave this job no GPUs (JOB_GRES of scontrol show job -d)")
            job.alert("failed", "failed", Cause("Slurm gave this job no GPUs"), NEVER_AGAIN)
            return False
    if not before:
        job.alert("started", "running", None, "")
    elif before[-1] != "requeued":  # else the alert was sent when the job was requeued
        following = "the job has restarted; " + resumes(job)
        job.alert("requeued", "running", Cause("its nodes were lost or preempted"), following)
    used = job.watch.ledger.gpu_seconds
    if hours_are_used(job.settings, used):
        ask_to_stop(job, hours_text(job.settings, used))  # somebody else has brought the job back
    return True


def _hear_nodes(job: Job) -> None:
    """Have the guards send heartbeats, if that is possible; otherwise Slurm reports lost nodes, later."""
    try:
        receiver = Receiver(job, Key(bytes.fromhex(job.folder.ask("key"))))
    except (OSError, Unavailable) as error:
        job.say("recovery.heartbeats has no effect: {}".format(error))
        job.values.words["heartbeats"] = ""
        if job.values.yes("standby"):
            _no_standby(job, "there are no heartbeats ({})".format(error))
        return
    job.values.words["heartbeats"] = receiver.where
    if job.values.yes("standby"):
        contact = Contact(job)
        job.folder.in_touch, receiver.hears = contact.holds, contact.look
    receiver.start()


def _finish(job: Job, attempts: Attempts) -> None:
    """Carry out the decision about the last attempt, and send alerts."""
    job.folder.confirm()
    job.messages.budget = 8
    if job.decision == NEXT:
        attempts.decide()  # a signal came between two attempts
    cause = job.cause or Cause("")
    if job.decision == REQUEUE and not job.ending and not put_back(job, cause, job.ended_by):
        job.decision = FAILED
    if job.decision == DONE:
        job.alert("finished", "done", None, "")
    elif job.ending:
        pass  # the alert was sent at once
    elif job.decision == FAILED:
        job.alert("failed", "failed", cause, NEVER_AGAIN)
    elif job.decision in (STOPPED, CANCELLED):
        job.send(stopped_alert(cause, job.kept))
    if job.decision == DONE:
        job.exit_code = 0
    elif job.decision == FAILED and job.exit_code == 0:
        job.exit_code = 1


def _end(job: Job) -> None:
    """Write the last record of the job, however it ended."""
    state = job.scheduler.job
    if job.values.yes("expedite") and job.decision != REQUEUE and job.exit_code != 0:
        words = ["timeout", "20", "scontrol", "update", "JobId=" + job.scheduler.job_id, "Requeue=0"]
        if job.loop.run(words, 25, errors=subprocess.STDOUT).code != 0:
            text = "Slurm did not take Requeue=0: it holds this job in the queue, or starts it again; scancel "
            job.say(text + job.scheduler.slurm_job)
    job.count_gpu_time()
    job.keep(job.watch.ledger, job.watch.ledger)
    job.event(JobEnded(job.exit_code, job.signal, state.state, state.reason, job.decision))
    job.say("exits with code {}; decision: {}".format(job.exit_code, job.decision))
    job.folder.settle(60)
    job.folder.confirm()  # what ends this script ends the job
    job.guard.end()
    _note(job, "finished", "{}\n".format(job.exit_code))
