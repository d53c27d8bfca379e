"""Whether the network between the nodes is measured before the ranks start, and with what it is compared."""

from __future__ import annotations

from slurmddp.job.plan.model import Layout, NetworkPlan, NodePlan
from slurmddp.job.resolve import Resolved


def plan_network(resolved: Resolved, nodes: NodePlan, layout: Layout) -> NetworkPlan:
    """By default, jobs with GPUs on several nodes are measured: without GPUs there is only TCP to choose."""
    wanted = resolved.job.network
    measure = layout.gpus_per_node > 0 if wanted.measure is None else wanted.measure
    return NetworkPlan(measure and nodes.max > 1, resolved.site.fabric, wanted.min_bandwidth, wanted.allow_socket)
