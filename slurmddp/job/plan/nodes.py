"""How many nodes the job has and how many ranks each starts: decided here, read everywhere else."""

from slurmddp.errors import UserError
from slurmddp.job.plan.layout import limited_by, named_partition, partition_of
from slurmddp.job.plan.model import Allocation, NodePlan, Note
from slurmddp.job.plan.ranks import plan_ranks, takes_whole_nodes
from slurmddp.job.resolve import Resolved


def plan_nodes(resolved: Resolved, gpus: int, allocation: Allocation | None) -> tuple[NodePlan, list[Note]]:
    """Return the nodes and ranks, with notes for the user. `gpus`: per node, with `ranks_per_node: auto` at least.

    Raises UserError for what the site, the partition or the allocation cannot give.
    """
    node_range = resolved.job.resources.node_range
    whole = takes_whole_nodes(resolved, gpus)
    ranks, notes = plan_ranks(resolved, gpus, whole)
    nodes = NodePlan(node_range.min, node_range.max, node_range.spares, ranks, whole)
    _check_site(resolved, nodes)
    if allocation is not None:
        _check_allocation(resolved, nodes, allocation)
    if ranks is None and gpus:
        _check_all_gpus(resolved, nodes, allocation)
    return nodes, notes


def _check_site(resolved: Resolved, nodes: NodePlan) -> None:
    if not resolved.site.queues and nodes.total > 1:
        raise UserError(
            f"site {resolved.site.name} runs on this machine only, not on {nodes.total} nodes",
            where=resolved.location("resources", "nodes"),
            todo="for more ranks on this machine, use --set resources.ranks_per_node=N",
        )
    most = partition_of(resolved).max_nodes
    if most and nodes.total > most:
        spares = f" (with {nodes.spares} spare)" if nodes.spares else ""
        raise UserError(
            f"{nodes.total} nodes{spares} are more than the {most} per job that {named_partition(resolved)} allows"
            f"{limited_by(resolved, 'max_nodes')}",
            where=resolved.location("resources", "nodes"),
            todo=f"ask for at most {most}",
        )


def _check_allocation(resolved: Resolved, nodes: NodePlan, allocation: Allocation) -> None:
    if nodes.elastic:
        raise UserError(
            "inside an allocation the number of nodes is fixed: a range or spares work only with `submit`",
            where=resolved.location("resources", "nodes"),
            todo=f"use --nodes {min(nodes.max, allocation.nodes)}",
        )
    if nodes.max > allocation.nodes:
        raise UserError(
            f"the current allocation has {allocation.nodes} node(s), the job needs {nodes.max}",
            where=resolved.location("resources", "nodes"),
            todo=f"use salloc --nodes={nodes.max}, or --nodes {allocation.nodes}",
        )


def _check_all_gpus(resolved: Resolved, nodes: NodePlan, allocation: Allocation | None) -> None:
    """Raise UserError for ranks that take all GPUs of the allocation, but not all of its nodes."""
    if nodes.elastic:
        raise UserError(
            "ranks_per_node: auto uses all GPUs of the allocation, so the job cannot start on fewer nodes",
            where=resolved.location("resources", "nodes"),
            todo="set a fixed number of nodes, or set ranks_per_node to a number",
        )
    if allocation is not None and nodes.max < allocation.nodes:
        raise UserError(
            f"ranks_per_node: auto uses all GPUs of the current allocation, which has {allocation.nodes} nodes",
            where=resolved.location("resources", "ranks_per_node"),
            todo=f"use --nodes {allocation.nodes}, or set ranks_per_node to a number",
        )
