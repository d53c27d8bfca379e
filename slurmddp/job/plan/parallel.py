"""How ranks share the model: whether `parallel` fits the ranks, and whether its shards stay inside a node."""

from __future__ import annotations

from slurmddp.errors import UserError
from slurmddp.job.plan.batch import fewer
from slurmddp.job.plan.model import NodePlan, Note
from slurmddp.job.resolve import Resolved
from slurmddp.shared import mesh

#: So many divisors of the ranks are named in full: more is more than anybody wants to read.
MANY = 8


def check_parallel(resolved: Resolved, nodes: NodePlan) -> list[Note]:
    """Raises UserError where replicate x shard is not the ranks, or an own script is to be sharded."""
    parallel = resolved.job.parallel
    if resolved.job.train.task is None and parallel.shard > 1:
        raise UserError(
            f"parallel.shard is {parallel.shard}, but your own script must wrap its model itself",
            where=resolved.location("parallel", "shard"),
            todo="remove parallel: it works only with train.task",
        )
    if nodes.world is None or nodes.ranks_per_node is None:
        text = "parallel: the nodes check that replicate x shard equals the number of ranks, once it is known"
        return [Note("note", text)] if parallel.shard > 1 or parallel.replicate else []
    where = resolved.location("parallel", "shard" if parallel.replicate is None else "replicate")
    try:
        mesh.sizes(nodes.world, parallel.replicate, parallel.shard)
    except ValueError as error:
        # The place names the key already.
        message, _, todo = str(error).partition(": ")[2].partition("; ")
        raise UserError(message, where=where, todo=f"{todo} (shard {_fitting(nodes.world)})") from None
    _check_fewer_nodes(resolved, nodes, nodes.ranks_per_node, where)
    return _crossing(parallel.shard, nodes.ranks_per_node)


def _check_fewer_nodes(resolved: Resolved, nodes: NodePlan, ranks_per_node: int, where: str) -> None:
    """Raises UserError where an attempt on fewer nodes, which resources.nodes allows, could not share the model so."""
    parallel = resolved.job.parallel
    if nodes.below_max and parallel.replicate is not None:
        raise UserError(
            f"parallel.replicate is fixed at {parallel.replicate}, but resources.nodes allows {nodes.min} to "
            f"{nodes.max} nodes",
            where=where,
            todo="remove replicate: it follows from the ranks and parallel.shard",
        )
    refused = [count for count in nodes.below_max if count * ranks_per_node % parallel.shard]
    if refused:
        raise UserError(
            f"parallel.shard {parallel.shard} does not divide the ranks of {fewer(refused)} nodes,"
            f" which resources.nodes allows ({ranks_per_node} ranks per node)",
            where=where,
            todo="use a shard that divides the ranks per node, or change resources.nodes",
        )


def _crossing(shard: int, ranks_per_node: int) -> list[Note]:
    """Groups of `shard` consecutive ranks stay inside their nodes where they divide a node's ranks."""
    if ranks_per_node % shard == 0:
        return []
    largest = max(size for size in range(1, ranks_per_node + 1) if ranks_per_node % size == 0 and shard % size == 0)
    better = f"; parallel.shard {largest} would stay inside a node" if largest > 1 else ""
    text = (
        f"shard groups of {shard} ranks cross nodes of {ranks_per_node}: every forward and backward pass sends "
        f"parameters over the network, which is slow{better}"
    )
    return [Note("note", text)]


def _fitting(world: int) -> str:
    """The numbers that divide `world`, the smallest first, in words."""
    sizes = [str(size) for size in range(1, world + 1) if world % size == 0]
    *first, last = sizes if len(sizes) <= MANY else [*sizes[: MANY - 1], "...", sizes[-1]]
    return f"{', '.join(first)} or {last}" if first else last
