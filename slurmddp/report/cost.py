"""What a job may use of a budget."""

from __future__ import annotations

from slurmddp.plan.model import Plan
from slurmddp.spec.types import slurm_time


def cost_line(plan: Plan) -> str:
    """GPU-hours at most, or node-hours where there are no GPUs; or why nothing can be said."""
    total, gpus = plan.nodes.total, plan.layout.gpus_per_node
    if plan.scheduler == "local":
        return "may use: this machine, until it is done"
    nodes = f"{total} node{'s' if total > 1 else ''}"
    shape = f"{nodes}, all that Slurm gives of them" if plan.nodes.world is None else f"{nodes} x {gpus} GPUs"
    if plan.node_hours is None:
        return f"may use: {shape}, for as long as the partition's default time (resources.time is not set)"
    clock = slurm_time(plan.time or 0)
    if plan.gpu_hours is None:
        return f"may use: {plan.node_hours:.3g} node-hours ({shape}, x {clock})"
    if not gpus:
        return f"may use: {plan.node_hours:.3g} node-hours ({total} x {clock}), no GPUs"
    return f"may use: {plan.gpu_hours:.4g} GPU-hours ({shape} x {clock})"
