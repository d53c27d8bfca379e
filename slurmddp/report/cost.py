"""What a job may use of a budget."""

from __future__ import annotations

from slurmddp.plan.model import Plan
from slurmddp.spec.types import slurm_time


def cost_line(plan: Plan) -> str:
    """GPU-hours at most, or node-hours where there are no GPUs; or why nothing can be said."""
    layout = plan.layout
    if plan.scheduler == "local":
        return "may use: this machine, until it is done"
    nodes = f"{plan.nodes} node{'s' if plan.nodes > 1 else ''}"
    shape = (
        f"{nodes}, all that Slurm gives of them" if layout.world is None else f"{nodes} x {layout.gpus_per_node} GPUs"
    )
    if plan.node_hours is None:
        return f"may use: {shape}, for as long as the partition's default time (resources.time is not set)"
    clock = slurm_time(plan.time or 0)
    if plan.gpu_hours is None:
        return f"may use: {plan.node_hours:.3g} node-hours ({shape}, x {clock})"
    if not layout.gpus:
        return f"may use: {plan.node_hours:.3g} node-hours ({plan.nodes} x {clock}), no GPUs"
    return f"may use: {plan.gpu_hours:.4g} GPU-hours ({shape} x {clock})"
