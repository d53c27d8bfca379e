"""The command line that hands a job over, before there is anything to hand over."""

from __future__ import annotations

from pathlib import Path

from slurmddp.plan.model import Plan
from slurmddp.runs.layout import RunFolder
from slurmddp.slurm.choose import scheduler_named


def preview(plan: Plan) -> tuple[str, ...]:
    """The command line of a submission whose run folder does not exist yet."""
    folder = RunFolder(Path(plan.runs_root) / "RUN_FOLDER")
    return scheduler_named(plan.scheduler).command((), "job.sh", (str(folder.path),), log=str(folder.job_log))
