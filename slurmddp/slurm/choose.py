"""Which of the two schedulers."""

from __future__ import annotations

from slurmddp.slurm.base import JobId, Scheduler


def scheduler_named(name: str) -> Scheduler:
    """Return `slurm` or `local`, as a site's profile says it."""
    if name == "local":
        from slurmddp.slurm.local import Local

        return Local()
    from slurmddp.slurm.client import Slurm

    return Slurm()


def scheduler_for(job_id: JobId) -> Scheduler:
    """Who knows of this job."""
    return scheduler_named("local" if job_id.is_local else "slurm")
