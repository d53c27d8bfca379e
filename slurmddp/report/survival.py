"""What happens to a run after a fault, and who gets an alert: lines of `slurmddp check`."""

from __future__ import annotations

from slurmddp.job.document import RUN
from slurmddp.job.plan.model import AlertsPlan, Plan

_BACK = {"requeue": "requeued and resumes", "chain": "continued by a new job (this site forbids requeues)"}
#: Of your own script nobody knows whether it resumes.
_OWN_BACK = {"requeue": "requeued", "chain": "followed by a new job (this site forbids requeues)"}
_OWN = "continues if it loads at its start what it saved (docs/frameworks.md); else it begins at step 1 again"
_LEAVE = {"node": "sent by job.sh", "proxy": "sent by job.sh through a proxy", "login": "sent from the login node"}


def survival_lines(plan: Plan) -> list[str]:
    """Return one line per kind of fault. Your own script restarts in the same way, but may not resume."""
    own = plan.runtime_job is None
    back = (_OWN_BACK if own else _BACK).get(plan.recovery.requeue, "")
    times = f"in place (up to {plan.max_restarts} times)" if plan.max_restarts else "in the next attempt"
    lines = [
        ("a rank dies", f"all ranks restart {times}" + ("" if own else ", from the newest checkpoint")),
        ("a node is lost", _lost(plan, back)),
        ("time limit", _time_limit(plan, back)),
        (
            "no progress",
            f"after {plan.recovery.no_progress} failed starts in a row at the same step, the run fails",
        ),
    ]
    if plan.srun is not None:
        lines.append(("launch.mode srun", "no restart in place, no signed rendezvous (docs/recovery.md)"))
    if own:
        lines.append(("your script", _OWN))
    if plan.scheduler == "local":
        lines = [line for line in lines if line[0] in ("a rank dies", "no progress", "your script")]
    elif not plan.recovery.preflight:
        lines.append(("preflight", "none: recovery.preflight is false"))
    if plan.layout.gpus_per_node:
        lines.append(("GPU hours", _worst_case(plan)))
    return [f"{what:<20}{becomes}" for what, becomes in (*lines, ("alerts", _alerts(plan.alerts, plan)))]


def _lost(plan: Plan, back: str) -> str:
    nodes = plan.nodes
    ends = f"the job is {back}" if back else "the run fails"
    if not nodes.elastic:
        return ends
    instead = ["a spare node replaces it"] if nodes.spares else []
    instead += [f"the run continues on the other nodes (at least {nodes.min})"] if nodes.min < nodes.max else []
    return f"{', then '.join(instead)}; with fewer nodes, {ends}"


def _time_limit(plan: Plan, back: str) -> str:
    ends = f"the job is {back} until training is done" if back else "the run stops there"
    if plan.recovery.must_save:
        where = " or ".join(("RUN/checkpoints", *(path.replace(RUN, "RUN") for path in plan.recovery.watch)))
        ends = f"if the script saved in {where} in it, {ends}; else the run stops there (recovery.requeue)"
    if plan.stop_lead is None:
        return f"no save before it; {ends}"
    save = "ranks save" if plan.runtime_job else "ranks are asked to save"
    return f"{save} {plan.stop_lead} s before it; {ends}"


def _worst_case(plan: Plan) -> str:
    """Return what all starts of the run may use together, or on what that depends."""
    limit, each = plan.recovery.max_gpu_hours, plan.gpu_hours
    if plan.recovery.requeue == "none" and each is not None and (limit is None or each <= limit):
        return f"at most {each:.4g}: nothing requeues the job"
    if limit is not None:
        return f"at most {limit:.4g} for all starts (recovery.max_gpu_hours), then the ranks save and the run stops"
    if plan.recovery.requeue == "none":
        return "no limit is known: set resources.time, or recovery.max_gpu_hours"
    start = "each start uses what its time allows" if each is None else f"up to {each:.4g} per start"
    return f"{start}, for as many starts as training needs: recovery.max_gpu_hours limits all together"


def _alerts(alerts: AlertsPlan | None, plan: Plan) -> str:
    """Return who gets which alerts; Slurm's own mail is among the sbatch options."""
    mail = [line.removeprefix("--mail-type=") for line in plan.sbatch if line.startswith("--mail-type=")]
    told = [f"mail ({mail[0].lower().replace(',', ', ')})"] if mail else []
    told = (
        [f"{target.name} ({', '.join(target.on)})" for target in alerts.targets if target.on] + told if alerts else told
    )
    if not told:
        return "none (see docs/alerts.md)"
    ways = [_LEAVE[alerts.leave]] if alerts else []
    ways += ["a watchdog job checks how it ended"] if plan.watchdog else []
    return "; ".join([", ".join(told), *ways])
