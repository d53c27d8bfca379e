"""A run that another version of slurmddp made: what this one can say of it, and how it is cancelled."""

from __future__ import annotations

import time

from slurmddp.cluster.base import ENDED, JobId
from slurmddp.cluster.choose import scheduler_for
from slurmddp.errors import ExternalError, UserError
from slurmddp.launch.cancel import LOOK_EVERY, RUNNING, Cancelled, Done, ask_to_stop
from slurmddp.run import index, manifest, submission
from slurmddp.run.gate import OwnRun
from slurmddp.run.layout import RunFolder


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
        raise UserError(
            f"run {folder.id} runs inside job {job_id}, so --now cannot cancel it",
            todo="press Ctrl-C twice in its terminal, or remove --now to save a checkpoint and exit",
        )
    lines = [f"Run {folder.id} was {manifest.other_version(folder)}."]
    done: Done = "cancelled"
    scheduler = scheduler_for(job_id)
    view = scheduler.job(job_id)
    runs = view is not None and view.state in RUNNING
    if view is None or view.state in ENDED:
        lines.append(f"Job {job_id} was already over.")
        done = "over"
    elif runs and not now:
        ask_to_stop(folder)
        done = "asked"
        which = f"Run {folder.id} inside job {job_id}" if inside else f"Job {job_id}"
        lines.append(
            f"{which} was asked to save and exit (stop file). Unknown: whether its script has begun to look at that "
            "file, and how long it may take."
        )
        if not inside:
            lines.append(f"To stop without saving: slurmddp cancel {folder.id} --now")
    else:
        _cancel(folder, job_id)
        lines.append(f"Cancelled job {job_id}.")
    if not inside and not job_id.is_local:
        lines.append("Unknown: whether the run has further jobs. To look: squeue --me")
    return Cancelled("\n".join(lines), ((job_id, done),) if done != "over" else ())


def wait_for_job(folder: RunFolder) -> str:
    """Look every two seconds until the job is over; what the scheduler says then. Raises UserError, ExternalError."""
    job_id, _ = _job(folder)
    while (view := scheduler_for(job_id).job(job_id)) is not None and view.state not in ENDED:
        time.sleep(LOOK_EVERY)
    return f"Job {job_id} is over{f': {view.state}' if view else ''}."


def _cancel(folder: OwnRun, job_id: JobId) -> None:
    try:
        ask_to_stop(folder)  # its job.sh sees it while it is ended, and requeues nothing
    finally:  # a full disk must not keep the job alive
        scheduler_for(job_id).cancel(job_id)


def _job(folder: RunFolder) -> tuple[JobId, bool]:
    """Return the run's job, and whether the run is only a part of it. Raises UserError."""
    try:
        sent = submission.read(folder)
    except UserError:
        sent = None  # written differently by that version
    if sent is not None and sent.job_id:
        return JobId.parse(sent.job_id), sent.scheduler == "allocation"
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
    """Return what the scheduler says of the run's job."""
    try:
        job_id, _ = _job(folder)
        view = scheduler_for(job_id).job(job_id)
    except (UserError, ExternalError, OSError):
        return "The state of its job is unknown"
    who = "This machine" if job_id.is_local else "Slurm"
    if view is None:
        return f"{who} no longer knows its job {job_id}"
    return f"{who} says that its job {job_id} is {view.state}{f' on {view.nodes}' if view.nodes else ''}"
