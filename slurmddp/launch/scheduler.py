"""What takes a job: Slurm, or this machine; and the command line that hands it over."""

from __future__ import annotations

from pathlib import Path

from slurmddp.plan.model import Plan
from slurmddp.runs.layout import RunFolder
from slurmddp.slurm.base import Scheduler


def scheduler_of(name: str) -> Scheduler:
    """`slurm` or `local`."""
    if name == "local":
        from slurmddp.slurm.local import Local

        return Local()
    from slurmddp.slurm.client import Slurm

    return Slurm()


def preview(plan: Plan) -> tuple[str, ...]:
    """The command line of a submission whose run folder does not exist yet."""
    folder = RunFolder(Path(plan.runs_root) / "RUN_FOLDER")
    scheduler = scheduler_of(plan.scheduler)
    return scheduler.command((), "job.sh", (str(folder.path),), log=str(folder.job_log))
