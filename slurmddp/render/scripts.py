"""The scripts of one job."""

import json
import sys
from collections.abc import Iterable

from slurmddp.job.plan.model import Plan, VariableGroup
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
        guarded=plan.queued,
        watch=json.dumps([host_path(path, plan.container.binds) for path in plan.recovery.watch]),
        saves=_saves(plan),
        python=python_of_submit(),
    )


def _saves(plan: Plan) -> str:
    """Return what the supervisor needs to choose the save that the ranks of launch.mode srun load; else empty."""
    text = plan.variable("SLURMDDP_RESUME")
    if not plan.srun or not text:
        return ""
    resume = json.loads(text)  # of an own script: `watch` is as the container has it
    return json.dumps({"watch": resume["watch"], "needed": bool(resume["args"]), "earlier": plan.resume_from})


def python_of_submit() -> str:
    """Return the interpreter for nodes without one in /usr. Not a virtual environment's, which may be gone by then."""
    return str(getattr(sys, "_base_executable", sys.executable))


def _preflight(plan: Plan) -> bool:
    """Inside an allocation, Slurm chooses the nodes of each step anew: they cannot be looked at before."""
    return bool(plan.job.recovery.preflight) and plan.queued


def node_script(plan: Plan) -> str:
    """node.sh: what srun starts on each node."""
    interface = plan.job.network.interface or ""
    # NCCL's own notation: "=" means the exact name, "^" means all but these, a list means the first that exists.
    prefix = "" if interface.startswith("^") else interface.lstrip("=").split(",")[0]
    variables = [(variable.base, variable.value) for group in plan.environment for variable in group.variables]
    return render(
        "sbatch/node.sh.j2",
        plan=plan,
        groups=without_python_path(plan.environment),
        prefix=plan.container.environment_prefix,
        interface_prefix=prefix,
        interface_exact=interface.startswith("="),
        python_path=plan.variable("PYTHONPATH"),
        gpu_vendor=plan.container.gpu_vendor,
        miopen=("scratch", "miopen") in variables,
        preflight=_preflight(plan),
        python=python_of_submit(),
    )


def alert_files(plan: Plan) -> dict[str, str]:
    """Name in the run folder -> text: a payload per alert target."""
    return {f"payloads/{name}": text for name, text in payloads(plan).items()}


def payloads(plan: Plan) -> dict[str, str]:
    """Return the payload of each alert target, by its name."""
    return {target.name: payload(plan, plan.alerts, target) for target in plan.alerts.targets} if plan.alerts else {}


def without_python_path(groups: Iterable[VariableGroup]) -> list[VariableGroup]:
    """PYTHONPATH is put together in one place, behind the run's own code."""
    kept = [group._replace(variables=tuple(v for v in group.variables if v.name != "PYTHONPATH")) for group in groups]
    return [group for group in kept if group.variables]
