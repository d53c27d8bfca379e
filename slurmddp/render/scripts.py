"""The scripts of one job."""

from __future__ import annotations

import json
import sys

from slurmddp.job.plan.model import Plan, Variable
from slurmddp.job.plan.program import host_path
from slurmddp.render.alert_texts import payload
from slurmddp.render.engine import render


def job_script(plan: Plan) -> str:
    """job.sh: exactly what sbatch gets. It takes the run folder as its one argument."""
    # Nodes that may differ in their GPUs: the script counts those of the job, and the step takes all.
    counts_gpus = plan.site.queues and plan.nodes.world is None and plan.layout.gpus_per_node > 0
    # A step of an existing allocation takes only what it needs, so that others fit beside it.
    known = ("--gpus-per-node", "--gres", "--mem=") if plan.nodes.world else ("--mem=",)
    exact = ["--exact"] if plan.nodes.world or plan.layout.cpus_per_node else []
    step = [*exact, *(line for line in plan.sbatch if line.startswith(known))] if plan.inside else []
    # Steps of our own job may lie over each other: one that still ends holds up nothing, and the guard is always there.
    # With it, Slurm would give each node of a step that asks for all GPUs the same number of them.
    overlap = [] if plan.inside or counts_gpus else ["--overlap"]
    cpus = [f"--cpus-per-task={plan.layout.cpus_per_node}"] if plan.layout.cpus_per_node else []
    return render(
        "sbatch/job.sh.j2",
        plan=plan,
        slurm=plan.site.queues,
        preflight=("only" if plan.job.recovery.preflight == "only" else "yes") if _preflight(plan) else "",
        measure=_preflight(plan) and plan.measures_network,
        step_options=[*cpus, *overlap, *step],
        counts_gpus=counts_gpus,
        guarded=_guarded(plan),
        watch=json.dumps([host_path(path, plan.container.binds) for path in plan.recovery.watch]),
        saves=_saves(plan),
        python=python_of_submit(),
    )


def _saves(plan: Plan) -> str:
    """Return what the supervisor needs to choose the save that the ranks of launch.mode srun load; else empty."""
    told = _value([variable for group in plan.environment for variable in group.variables], "SLURMDDP_RESUME")
    if not plan.srun or not told:
        return ""
    resume = json.loads(told)  # of an own script: `watch` is as the container has it
    return json.dumps({"watch": resume["watch"], "needed": bool(resume["args"]), "earlier": plan.resume_from})


def python_of_submit() -> str:
    """Return the interpreter for nodes without one in /usr. Not a virtual environment's, which may be gone by then."""
    return str(getattr(sys, "_base_executable", sys.executable))


def _guarded(plan: Plan) -> bool:
    """Return whether the end of job.sh is the end of a Slurm job, of which somebody has to take care."""
    return plan.queued


def _preflight(plan: Plan) -> bool:
    """Inside an allocation, Slurm chooses the nodes of each step anew: they cannot be looked at before."""
    return bool(plan.job.recovery.preflight) and plan.queued


def node_script(plan: Plan) -> str:
    """node.sh: what srun starts on each node."""
    interface = plan.job.network.interface or ""
    # NCCL's own notation: "=" means the exact name, "^" means all but these, a list means the first that exists.
    wanted = "" if interface.startswith("^") else interface.lstrip("=").split(",")[0]
    own = [variable for group in plan.environment for variable in group.variables]
    return render(
        "sbatch/node.sh.j2",
        plan=_without(plan, "PYTHONPATH"),
        prefix=plan.container.environment_prefix,
        interface_prefix=wanted,
        interface_exact=interface.startswith("="),
        python_path=_value(own, "PYTHONPATH"),
        gpu_vendor=plan.container.gpu_vendor,
        miopen=any((variable.base, variable.value) == ("scratch", "miopen") for variable in own),
        preflight=_preflight(plan),
        python=python_of_submit(),
    )


def alert_files(plan: Plan) -> dict[str, str]:
    """Name in the run folder -> text: a payload per alert target."""
    return {f"payloads/{name}": text for name, text in payloads(plan).items()}


def payloads(plan: Plan) -> dict[str, str]:
    """Return the payload of each alert target, by its name."""
    return {target.name: payload(plan, plan.alerts, target) for target in plan.alerts.targets} if plan.alerts else {}


def _value(variables: list[Variable], name: str) -> str:
    return next((variable.value for variable in reversed(variables) if variable.name == name), "")


def _without(plan: Plan, name: str) -> Plan:
    """PYTHONPATH is put together in one place, behind the run's own code."""
    groups = tuple(
        group._replace(variables=tuple(variable for variable in group.variables if variable.name != name))
        for group in plan.environment
    )
    return plan._replace(environment=tuple(group for group in groups if group.variables))
