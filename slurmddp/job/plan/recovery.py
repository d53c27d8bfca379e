"""How a job recovers from faults: how it is requeued, and when its ranks save before the time limit."""

import math
from typing import Literal

from slurmddp.errors import UserError
from slurmddp.job.job import Job
from slurmddp.job.plan.model import Layout, NodePlan, Note, RecoveryPlan
from slurmddp.job.resolve import Resolved

#: Restarts of the workers in place that torchrun is allowed with c10d: no run needs as many, the breaker comes first.
RESTARTS = 100

#: Starts from step 1 again that an own script may make after faults, unless recovery.requeue is `always`.
FROM_ZERO = 2
#: A job shorter than this is not told before its time limit: Slurm may send the signal up to 60 s early.
SHORTEST_WITH_STOP = 180
#: Seconds from the stop file to the time limit: at least; and what a save leaves for all that is not the save.
SHORTEST_LEAD = 120
BESIDE_THE_SAVE = 30


def plan_recovery(
    resolved: Resolved, nodes: NodePlan, layout: Layout, watch: tuple[str, ...], inside: bool
) -> tuple[RecoveryPlan, list[Note]]:
    """inside: the job is a step of an allocation that is not its own, which it cannot send back to the queue.

    Raises UserError for `preflight: only` where there is no preflight.
    """
    recovery, site = resolved.job.recovery, resolved.site
    requeue: Literal["requeue", "chain", "none"] = "chain" if site.requeue == "chain" else "requeue"
    if recovery.requeue == "never" or inside or not site.queues:
        requeue = "none"
    if recovery.preflight == "only" and (inside or not site.queues):
        raise UserError(
            f"{'a step of another job' if inside else f'a job of site {site.name}, without Slurm,'} has no preflight",
            where=resolved.location(*(("recovery", "preflight") if inside else ("site",))),
            todo="submit it to a cluster: --site NAME (`slurmddp site` lists all)",
        )
    notes = []
    if nodes.elastic and "--no-kill" in site.unsupported_flags:
        text = f"site {site.name} rejects --no-kill: the whole job fails when one node fails"
        notes.append(Note("warning", text))
    if recovery.max_gpu_hours is not None and not layout.gpus_per_node:
        notes.append(Note("warning", "recovery.max_gpu_hours limits nothing: this job has no GPUs"))
    if recovery.fork and (why := _not_forked(resolved, layout)):
        notes.append(Note("warning", f"recovery.fork has no effect: {why}"))
    keeps = "" if nodes.elastic else "this job cannot lose a node: set resources.nodes to a range, or add spares"
    cold = keeps or ("" if recovery.fork else "it needs recovery.fork") or _not_forked(resolved, layout)
    stays = keeps or (f"site {site.name} rejects --no-kill" if "--no-kill" in site.unsupported_flags else "")
    stays = stays or ("" if recovery.heartbeats else "it needs recovery.heartbeats")
    wishes = (("heartbeats", recovery.heartbeats, keeps), ("spares_warm", recovery.spares_warm, cold))
    for key, wanted, why in (*wishes, ("standby", recovery.standby, stays)):
        if wanted and why:
            notes.append(Note("warning", f"recovery.{key} has no effect: {why}"))
    expedite = site.requeue == "expedite" and requeue == "requeue"
    is_script = resolved.job.train.task is None
    must_save = is_script and requeue != "none" and recovery.requeue == "auto"
    # In one job, too, and on one machine: whoever wants any number of them says so.
    from_zero = FROM_ZERO if is_script and recovery.requeue != "always" else None
    warm = recovery.spares_warm and not cold
    standby = recovery.standby and not stays
    return RecoveryPlan(requeue, expedite, must_save, watch, from_zero, warm, standby), notes


def _not_forked(resolved: Resolved, layout: Layout) -> str:
    """Return why the ranks start as fresh processes, as far as the job tells; the agents see the rest."""
    job, amd = resolved.job, resolved.site.gpu_vendor == "amd"
    if job.launch.mode == "srun":
        return "with launch.mode srun, no agent starts the ranks"
    if job.train.task is not None:
        return "only scripts of your own are forked, not the bundled tasks"
    return "forked ranks were not tried with AMD's GPUs" if amd and layout.gpus_per_node else ""


def max_restarts(job: Job) -> int:
    """Restarts of the workers in place that torchrun may make."""
    setting = job.launch.max_restarts
    if setting is not None:
        return setting
    return RESTARTS if job.launch.rendezvous == "c10d" and job.launch.mode == "torchrun" else 0


def plan_stop_lead(time: int | None, wanted: int | None, save_seconds: float | None) -> int | None:
    """Return the seconds before the time limit at which the ranks save and exit.

    wanted: timeouts.stop; save_seconds: the longest save of the runs that this one continues, from which the lead is
    planned where nothing is wanted. A short job gets a third of its time. Slurm may send the signal up to 60 s early
    (sbatch(1), --signal), so a job of less than three minutes gets none.
    """
    if time is None or time < SHORTEST_WITH_STOP:
        return None
    return min(wanted or lead_of(save_seconds), time // 3)


def plan_cancel_grace(time: int | None, wanted: int | None, save_seconds: float | None) -> int:
    """Return the seconds that an own script has to save and exit after `slurmddp cancel`: as before the time limit."""
    return plan_stop_lead(time, wanted, save_seconds) or min(wanted or lead_of(save_seconds), time or SHORTEST_LEAD)


def explain_stop_lead(time: int | None, wanted: int | None, save_seconds: float | None) -> str:
    """One line: the lead that was planned, and from what."""
    lead = plan_stop_lead(time, wanted, save_seconds)
    if lead is None:
        known = "no time limit is known" if time is None else f"a job of {time} s is too short"
        return f"planned: none ({known}); progress since the last checkpoint is lost at the time limit"
    if lead < (wanted or lead_of(save_seconds)):
        return f"planned: {lead} s (a third of {time} s, which is less than {wanted or lead_of(save_seconds)} s)"
    if wanted:
        return f"planned: {lead} s, as set"
    if save_seconds is None:
        return f"planned: {lead} s (the save time is unknown; with --resume RUN, the longest save of RUN counts)"
    saves = f"the longest save of the resumed runs took {save_seconds:.3g} s"
    return f"planned: {lead} s ({saves}: twice that + {BESIDE_THE_SAVE} s, at least {SHORTEST_LEAD} s)"


def lead_of(save_seconds: float | None) -> int:
    """The lead that fits a save of so many seconds: it may have to wait for one that is being written."""
    if save_seconds is None:
        return SHORTEST_LEAD
    return max(SHORTEST_LEAD, math.ceil(2 * save_seconds + BESIDE_THE_SAVE))
