"""What becomes of a run in which something breaks, and who is told: lines of `slurmddp plan`."""

from __future__ import annotations

from slurmddp.plan.model import AlertsPlan, Plan

_BACK = {"requeue": "requeued, and goes on", "chain": "followed by a job that goes on (requeues are forbidden here)"}
_LEAVE = {"node": "sent by job.sh", "proxy": "sent by job.sh through a proxy", "login": "sent from the login node"}


def survival_lines(plan: Plan) -> list[str]:
    """One line for each thing that can happen. A script of one's own restarts alike, and resumes as it knows."""
    back = _BACK.get(plan.recovery.requeue, "")
    resume = "from the newest checkpoint" if plan.runtime_job else "and resume as the script does"
    times = f"up to {plan.max_restarts} times in place" if plan.max_restarts else "in the next attempt"
    lines = [
        ("a rank dies", f"all ranks start again {times}, {resume}"),
        ("a node is lost", _lost(plan, back)),
        ("time limit", _time_limit(plan, back)),
        ("no progress", f"after {plan.recovery.no_progress} failed starts that get no further, the run stops for good"),
    ]
    if plan.scheduler == "local":
        lines = [line for line in lines if line[0] in ("a rank dies", "no progress")]
    elif not plan.recovery.preflight:
        lines.append(("preflight", "none: recovery.preflight is false"))
    return [f"{what:<20}{becomes}" for what, becomes in (*lines, ("alerts", _alerts(plan.alerts, plan)))]


def _lost(plan: Plan, back: str) -> str:
    nodes = plan.nodes
    ends = f"the job is {back}" if back else "the run ends"
    if not nodes.elastic:
        return ends
    instead = ["a spare takes its place"] if nodes.spares else []
    instead += [f"the others go on, down to {nodes.min}"] if nodes.min < nodes.max else []
    return f"{', then '.join(instead)}; below that, {ends}"


def _time_limit(plan: Plan, back: str) -> str:
    ends = f"the job is {back} until it is done" if back else "the run ends there"
    if plan.stop_lead is None:
        return f"no warning ahead of it: {ends}"
    return f"told to save {plan.stop_lead} s ahead; {ends}"


def _alerts(alerts: AlertsPlan | None, plan: Plan) -> str:
    """Who is told of what; Slurm's own mail is among the sbatch options."""
    mail = [line.removeprefix("--mail-type=") for line in plan.sbatch if line.startswith("--mail-type=")]
    told = [f"mail ({mail[0].lower().replace(',', ', ')})"] if mail else []
    told = (
        [f"{target.name} ({', '.join(target.on)})" for target in alerts.targets if target.on] + told if alerts else told
    )
    if not told:
        return "none: nobody is told (docs/alerts.md)"
    ways = [_LEAVE[alerts.leave]] if alerts else []
    ways += ["a watchdog job checks how it ended"] if plan.watchdog else []
    return "; ".join([", ".join(told), *ways])
