"""What a job may cost."""

from __future__ import annotations

from slurmddp.job.plan.model import Plan
from slurmddp.job.types import slurm_time


def cost_line(plan: Plan) -> str:
    """Return the maximum GPU-hours, the node-hours of a job without GPUs, or why neither is known."""
    total, gpus = plan.nodes.total, plan.layout.gpus_per_node
    if plan.scheduler == "local":
        return "cost: this machine, until training is done"
    nodes = f"{total} node{'s' if total > 1 else ''}"
    shape = f"{nodes}, as many as Slurm gives" if plan.nodes.world is None else f"{nodes} x {gpus} GPUs"
    if plan.node_hours is None:
        return f"cost: {shape}, for the partition's default time (resources.time is not set)"
    clock = slurm_time(plan.time or 0)
    if plan.gpu_hours is None:
        return f"cost: up to {plan.node_hours:.3g} node-hours ({shape}, x {clock})"
    if not gpus:
        return f"cost: up to {plan.node_hours:.3g} node-hours ({total} x {clock}), no GPUs"
    return f"cost: up to {plan.gpu_hours:.4g} GPU-hours ({shape} x {clock})"
