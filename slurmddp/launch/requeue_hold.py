"""The two minutes that Slurm holds a requeued job back, ended by its owner."""

import contextlib
from datetime import datetime

from slurmddp.cluster.base import JobId, JobView
from slurmddp.cluster.choose import scheduler_for
from slurmddp.cluster.client import ask
from slurmddp.cluster.states import JobState
from slurmddp.errors import ExternalError, UserError
from slurmddp.records.job_events import HoldReleased, JobStarted
from slurmddp.run.evidence import Evidence
from slurmddp.run.gate import own_or_none
from slurmddp.run.layout import RunFolder
from slurmddp.run.state import RunState, judge, observe
from slurmddp.supervisor.release import is_free

#: Slurm holds a requeued job back for 121 s (src/slurmctld/job_mgr.c); a later start is one that somebody chose. The
#: first seconds are left to what job.sh left behind, which also keeps the job off the nodes that it excluded.
LONGEST = 110.0


def state_now(folder: RunFolder) -> RunState:
    """Return the state of a run, and release its job from the hold. Raises UserError, OSError, ExternalError."""
    facts, view = observe(folder)
    release_hold(folder, facts, view)
    return judge(view, facts)


def is_held(facts: Evidence, view: JobView | None) -> bool:
    """Return whether Slurm holds this job only because it was requeued. Pure but for the time now."""
    if view is None or view.state is not JobState.PENDING or view.reason != "BeginTime":
        return False
    if not view.restarts and facts.requeued is None:
        return False
    try:
        # The cluster's local time, which a login host shares. A hold that has been ended keeps its reason for a while.
        start = datetime.fromisoformat(view.start or "")
    except ValueError:
        return False
    return 0 < (start - datetime.now()).total_seconds() <= LONGEST


def _is_free(job_id: JobId, facts: Evidence) -> bool:
    """Return whether no step of the job lives on its old nodes, and all of them answer: else Slurm ends the hold."""
    cluster = ("-M", job_id.cluster) if job_id.cluster else ()

    def ask_slurm(program: str, *words: str) -> str | None:
        answer = ask((program, *cluster, *words))
        return answer.out if answer.code == 0 else None

    started = facts.started.facts if facts.started else None
    nodes = started.nodes if isinstance(started, JobStarted) else ""
    return is_free(job_id.id, nodes, ask_slurm) == (True, [])


def release_hold(folder: RunFolder, facts: Evidence, view: JobView | None) -> str | None:
    """Let a job that Slurm holds back after a requeue begin now, if the run is this user's.

    None where there was nothing to do; else what was done, or why it could not be. Never raises: no command may fail
    because of it.
    """
    job_id = facts.job_id
    if job_id is None or job_id.is_local or not is_held(facts, view):
        return None
    try:
        own_run = own_or_none(folder)
        if own_run is None:
            return None
        if not _is_free(job_id, facts):
            return None
        scheduler_for(job_id).start_now(job_id)
    except (ExternalError, UserError, OSError) as error:
        until = f" until {view.start}" if view and view.start else ""
        return f"Slurm holds the requeued job{until}, and slurmddp could not release it: {error}"
    with contextlib.suppress(OSError):  # a run folder on a full disk: the job continues anyway
        own_run.record(HoldReleased(), str(job_id))
    return f"released the requeued job {job_id} from its two-minute hold: it can start now"
