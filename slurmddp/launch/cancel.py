"""`slurmddp cancel`: ranks save a checkpoint, then exit, and the run is not requeued."""

import time
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from slurmddp.cluster.base import JobId
from slurmddp.cluster.choose import scheduler_for
from slurmddp.cluster.states import JobState
from slurmddp.errors import ExternalError, UserError
from slurmddp.records.events import of
from slurmddp.records.job_events import CancelRequested, JobStarted
from slurmddp.records.stop import CANCELLED, StopRequest
from slurmddp.run import index, manifest, submission
from slurmddp.run.evidence import Evidence, evidence
from slurmddp.run.gate import OwnRun
from slurmddp.run.layout import RunFolder
from slurmddp.run.state import RunState
from slurmddp.run.unanswered import with_job

#: Seconds between two looks while the end is waited for.
LOOK_EVERY = 2.0
Done = Literal["asked", "cancelled", "over"]


class Cancelled(NamedTuple):
    """What was done, in a few lines for people, and to each job; those that were over are left out."""

    text: str
    jobs: tuple[tuple[JobId, Done], ...]


def cancel_run(folder: OwnRun, *, now: bool) -> Cancelled:
    """End a run for good.

    A job that runs is asked to save and exit, through the stop file: bundled tasks do, and job.sh terminates an own
    script that does not. A job that waits, and with `now` any, is cancelled at once; of a chain, each one.

    Raises UserError where there is no job that could be ended, ExternalError.
    """
    facts = with_job(folder, evidence(folder))
    if facts.job_id is None:
        raise UserError(f"run {folder.id} was never submitted: there is no job to cancel")
    if facts.submission is not None and facts.submission.inside:
        return _cancel_inside(folder, facts, now)
    done: list[tuple[JobId, Done]] = []
    try:
        # The newest first: of a chain it waits for the one before, and would begin when that one ends.
        for job_id in reversed(facts.job_ids):
            if (each := _end(folder, job_id, now, begun=_began(facts, job_id))) != "over":
                done.append((job_id, each))
    finally:
        if done:  # of a run that had ended, it would make a failure look cancelled
            folder.record(CancelRequested(now), str(facts.job_id))
    return Cancelled(_told(folder, done, facts), tuple(done))


def wait_until_over(look: Callable[[], RunState]) -> RunState:
    """Look every two seconds until the run has ended."""
    while (state := look()).going:
        time.sleep(LOOK_EVERY)
    return state


def _cancel_inside(folder: OwnRun, facts: Evidence, now: bool) -> Cancelled:
    """Cancel a run inside an allocation that is not its own: only the stop file may be used."""
    if now:
        raise _not_alone(folder, facts.job_id)
    if facts.ended:
        return Cancelled(f"Run {folder.id} was already over.", ())
    folder.record(CancelRequested(now=False), str(facts.job_id))
    ask_to_stop(folder)
    text = f"Run {folder.id} {_asked(facts)} Job {facts.job_id}, inside which it runs, continues."
    return Cancelled(text, ((facts.job_id, "asked"),) if facts.job_id else ())


def _not_alone(folder: OwnRun, job_id: JobId | None) -> UserError:
    todo = "press Ctrl-C twice in its terminal, or remove --now to save a checkpoint and exit"
    return UserError(f"run {folder.id} runs inside job {job_id}, so --now cannot cancel it", todo=todo)


def _end(folder: OwnRun, job_id: JobId, now: bool, *, begun: bool) -> Done:
    scheduler = scheduler_for(job_id)
    view = scheduler.job(job_id)
    if view is not None and view.state is JobState.RUNNING and begun and not now:
        ask_to_stop(folder)
        return "asked"
    if view is None and not now:
        return "over"
    try:
        if view is not None and not view.state.over and (now or begun):
            ask_to_stop(folder)  # job.sh and the guard see it while they are ended, and requeue nothing
    finally:  # a full disk must not keep the job alive
        was_there = scheduler.cancel(job_id)
    return "cancelled" if was_there else "over"


def _began(facts: Evidence, job_id: JobId) -> bool:
    """Return whether this job's script has started: it removes an older stop file, so an earlier one has no effect."""
    # The script of a local run calls its job local-PID, without the time at which that began.
    known = job_id.id.rpartition("-")[0] if job_id.is_local else job_id.id
    return any(event.job_id == known for event, _ in of(facts.events, JobStarted))


def ask_to_stop(folder: OwnRun) -> None:
    """Write the stop file atomically. This reason is final."""
    folder.held.write(folder.stop, StopRequest(CANCELLED).text())


def _asked(facts: Evidence) -> str:
    """Return what becomes of ranks that were asked to stop. An own script may not look at the stop file."""
    if facts.cancel_grace is None:
        return "is saving and will exit."
    return f"has {facts.cancel_grace} s to save and exit, then its ranks are terminated."


def _told(folder: OwnRun, done: Sequence[tuple[JobId, Done]], facts: Evidence) -> str:
    lines = [f"Cancelled job {job_id}." for job_id, each in done if each == "cancelled"]
    lines += [f"Job {job_id} {_asked(facts)}" for job_id, each in done if each == "asked"]
    if not lines:
        return f"Job {facts.job_id} was already over."
    lines[-1] += " It will not be requeued."
    if any(each == "asked" for _, each in done):
        lines.append(
            f"To watch: slurmddp status {folder.id}. To stop without saving: slurmddp cancel {folder.id} --now"
        )
    return "\n".join(lines)


def refuse_other_version(folder: RunFolder) -> None:
    """Raise UserError for a run of another version, with what the scheduler says of its job."""
    if manifest.other_version(folder):
        manifest.require_version(folder, _by_scheduler(folder))


def cancel_other_version(folder: OwnRun, *, now: bool) -> Cancelled:
    """Cancel the job of a run of another version.

    Nothing is written into its events. A running job finds the stop file, whose name and first line are the same in
    all versions. Raises UserError where its job is not known, ExternalError.
    """
    job_id, inside = _job(folder)
    if inside and now:
        raise _not_alone(folder, job_id)
    done = _end(folder, job_id, now, begun=True)
    lines = [f"Run {folder.id} was {manifest.other_version(folder)}."]
    if done == "asked":
        which = f"Run {folder.id} inside job {job_id}" if inside else f"Job {job_id}"
        lines.append(
            f"{which} was asked to save and exit (stop file). Unknown: whether its script has begun to look at that "
            "file, and how long it may take."
        )
        lines += [] if inside else [f"To stop without saving: slurmddp cancel {folder.id} --now"]
    else:
        lines.append(f"Cancelled job {job_id}." if done == "cancelled" else f"Job {job_id} was already over.")
    if not inside and not job_id.is_local:
        lines.append("Unknown: whether the run has further jobs. To look: squeue --me")
    return Cancelled("\n".join(lines), ((job_id, done),) if done != "over" else ())


def wait_for_job(folder: RunFolder) -> str:
    """Look every two seconds until the job is over; what the scheduler says then. Raises UserError, ExternalError."""
    job_id, _ = _job(folder)
    while (view := scheduler_for(job_id).job(job_id)) is not None and not view.state.over:
        time.sleep(LOOK_EVERY)
    return f"Job {job_id} is over{f': {view.word}' if view else ''}."


def _job(folder: RunFolder) -> tuple[JobId, bool]:
    """Return the run's job, and whether the run is only a part of it. Raises UserError."""
    try:
        sent = submission.read(folder)
    except UserError:
        sent = None  # written differently by that version
    if sent is not None and sent.job_id:
        return JobId.parse(sent.job_id), sent.inside
    if number := next(
        (entry.job_id for entry in index.entries() if entry.path == str(folder.path) and entry.job_id), ""
    ):
        return JobId.parse(number), False
    raise UserError(
        f"run {folder.id} was {manifest.other_version(folder)}. Its job is not known",
        where=str(folder.submission),
        todo="find it with squeue --me, then use scancel",
    )


def _by_scheduler(folder: RunFolder) -> str:
    try:
        job_id, _ = _job(folder)
        view = scheduler_for(job_id).job(job_id)
    except (UserError, ExternalError, OSError):
        return "The state of its job is unknown"
    who = "This machine" if job_id.is_local else "Slurm"
    if view is None:
        return f"{who} no longer knows its job {job_id}"
    return f"{who} says that its job {job_id} is {view.word}{f' on {view.nodes}' if view.nodes else ''}"
