"""The watchdog job: submitted behind a run's job, where the site has one."""

from __future__ import annotations

from slurmddp.cluster.base import JobId
from slurmddp.cluster.client import Slurm
from slurmddp.errors import ExternalError, UserError
from slurmddp.job.plan.model import Plan
from slurmddp.render.scripts import python_of_submit
from slurmddp.run.gate import OwnRun


def submit_watchdog(plan: Plan, folder: OwnRun, job_id: JobId) -> str | None:
    """Submit the watchdog behind the job.

    Returns None, or a warning: a watchdog job that Slurm refuses must not cost the run.
    """
    if plan.watchdog is None:
        return None
    asked = plan.watchdog  # the script passes them on to the next one
    cluster = [f"--clusters={job_id.cluster}"] if job_id.cluster else []
    options = [*asked, "--open-mode=append", f"--dependency=afterany:{job_id.id}", *cluster]
    python = python_of_submit()
    slurm = Slurm()
    try:
        command = slurm.command(
            options,
            str(folder.python_sh),
            (python, str(folder.code_archive), "watchdog", str(folder.path), job_id.id, python, *asked),
            log=str(folder.logs / "watchdog.log"),
        )
        slurm.submit(command, folder.path)
    except (UserError, ExternalError, OSError) as error:
        return f"could not submit the watchdog job: {error}"
    return None
