"""Which of the two schedulers."""

from collections.abc import Callable, Iterable

from slurmddp.cluster.base import JobId, JobView, Scheduler
from slurmddp.errors import ExternalError, UserError
from slurmddp.styled import labelled


def scheduler_named(name: str) -> Scheduler:
    """Return `slurm` or `local`, as a site's profile says it."""
    if name == "local":
        from slurmddp.cluster.local import Local

        return Local()
    from slurmddp.cluster.client import Slurm

    return Slurm()


def scheduler_for(job_id: JobId) -> Scheduler:
    """Return who knows of this job."""
    return scheduler_named("local" if job_id.is_local else "slurm")


def ask_all(job_ids: Iterable[JobId], say: Callable[[str], None]) -> tuple[dict[JobId, JobView], set[bool]]:
    """Ask each scheduler once about its jobs. Return what is known of them, and which schedulers did not answer: their
    `is_local`. `say` hears why.
    """
    views: dict[JobId, JobView] = {}
    silent: set[bool] = set()
    by_scheduler: dict[bool, list[JobId]] = {}
    for job_id in job_ids:
        by_scheduler.setdefault(job_id.is_local, []).append(job_id)
    for is_local, several in by_scheduler.items():
        try:
            views |= scheduler_for(several[0]).jobs(several)
        except (ExternalError, UserError) as error:
            say(labelled("warning", f"{error}"))
            silent.add(is_local)
    return views, silent
