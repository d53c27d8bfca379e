"""The scripts of one job."""

from __future__ import annotations

from slurmddp.plan.model import Plan, Variable
from slurmddp.render.engine import render


def job_script(plan: Plan) -> str:
    """job.sh: exactly what sbatch gets. It takes the run folder as its one argument."""
    # Nodes that may differ in their GPUs: the script counts those of the job, and the step takes all.
    counts_gpus = plan.scheduler == "slurm" and plan.layout.world is None and plan.layout.gpus_per_node > 0
    # A step of an existing allocation takes only what it needs, so that others fit beside it.
    known = ("--gpus-per-node", "--gres", "--mem=") if plan.layout.world else ("--mem=",)
    exact = ["--exact"] if plan.layout.world or plan.layout.cpus_per_node else []
    step = [*exact, *(line for line in plan.sbatch if line.startswith(known))] if plan.inside else []
    return render("sbatch/job.sh.j2", plan=plan, step_options=step, counts_gpus=counts_gpus)


def node_script(plan: Plan) -> str:
    """node.sh: what srun starts on each node."""
    interface = plan.interface or ""
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
    )


def _value(variables: list[Variable], name: str) -> str:
    return next((variable.value for variable in reversed(variables) if variable.name == name), "")


def _without(plan: Plan, name: str) -> Plan:
    """PYTHONPATH is put together in one place, behind the run's own code."""
    groups = tuple(
        group._replace(variables=tuple(variable for variable in group.variables if variable.name != name))
        for group in plan.environment
    )
    return plan._replace(environment=tuple(group for group in groups if group.variables))
