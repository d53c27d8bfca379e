"""How ranks share the model: whether `parallel` fits the ranks and the model, and what stays inside a node."""

from math import gcd

from slurmddp.errors import UserError
from slurmddp.job.plan.batch import fewer
from slurmddp.job.plan.model import NodePlan, Note
from slurmddp.job.resolve import Resolved
from slurmddp.shared import mesh
from slurmddp.shared.task_options import BYTES, OPTIONS

#: So many divisors of the ranks are named in full: more is more than anybody wants to read.
MANY = 8


def check_tensor(resolved: Resolved, nodes: NodePlan) -> None:
    """Raise UserError where `parallel.tensor` does not fit the task, the nodes or the model."""
    tensor, train = resolved.job.parallel.tensor, resolved.job.train
    _check_own(resolved, "tensor")
    if tensor == 1:
        return
    ranks, problem = nodes.ranks_per_node, ""
    options = OPTIONS["lm"]
    sizes = {
        f"train.{part}.{key}": getattr(train, part).get(key) or options[part][key].default or BYTES
        for part, key in (("model", "heads"), ("data", "context"), ("model", "vocabulary"))
    }
    if train.task != "lm":
        problem, todo = f"works only with the task lm, not {train.task}", "remove it, or use parallel.shard"
    elif ranks is None:
        problem = "needs the same number of ranks on each node, and with ranks_per_node: auto they may differ"
        todo = "set resources.ranks_per_node to a number"
    elif ranks % tensor:
        problem = f"would cross nodes: {tensor} does not divide {ranks} ranks per node"
        todo = f"use {_fitting(ranks)}"
    else:
        uneven = [f"{key} {size}" for key, size in sizes.items() if size % tensor]
        if uneven:
            problem = f"{tensor} does not divide {' and '.join(uneven)}"
            todo = f"use {_fitting(gcd(*sizes.values(), ranks))}, or change the model"
    if problem:
        raise UserError(f"parallel.tensor {problem}", where=resolved.location("parallel", "tensor"), todo=todo)


def _check_own(resolved: Resolved, key: str) -> None:
    size = getattr(resolved.job.parallel, key)
    if resolved.job.train.task is None and size > 1:
        raise UserError(
            f"parallel.{key} is {size}, but your own script must wrap its model itself",
            where=resolved.location("parallel", key),
            todo="remove parallel: it works only with train.task",
        )


def check_parallel(resolved: Resolved, nodes: NodePlan) -> list[Note]:
    """Raises UserError where replicate x shard x tensor is not the ranks, or an own script is to be sharded."""
    parallel = resolved.job.parallel
    _check_own(resolved, "shard")
    if nodes.world is None or nodes.ranks_per_node is None:
        text = "parallel: the nodes check that replicate x shard equals the number of ranks, once it is known"
        return [Note("note", text)] if parallel.shard > 1 or parallel.replicate else []
    where = resolved.location("parallel", "shard" if parallel.replicate is None else "replicate")
    try:
        mesh.sizes(nodes.world, parallel.replicate, parallel.shard, parallel.tensor)
    except ValueError as error:
        # The place names the key already.
        message, _, todo = str(error).partition(": ")[2].partition("; ")
        todo += f" (shard {_fitting(nodes.world // parallel.tensor)})"
        raise UserError(message, where=where, todo=todo) from None
    _check_fewer_nodes(resolved, nodes, nodes.ranks_per_node, where)
    return _crossing(parallel.shard, nodes.ranks_per_node // parallel.tensor, parallel.tensor)


def _check_fewer_nodes(resolved: Resolved, nodes: NodePlan, ranks_per_node: int, where: str) -> None:
    """Raises UserError where an attempt on fewer nodes, which resources.nodes allows, could not share the model so."""
    parallel, tensor = resolved.job.parallel, resolved.job.parallel.tensor
    if nodes.below_max and parallel.replicate is not None:
        raise UserError(
            f"parallel.replicate is fixed at {parallel.replicate}, but resources.nodes allows {nodes.min} to "
            f"{nodes.max} nodes",
            where=where,
            todo="remove replicate: it follows from the ranks and parallel.shard",
        )
    refused = [count for count in nodes.below_max if count * ranks_per_node % (parallel.shard * tensor)]
    if refused:
        product = f"{parallel.shard} x tensor {tensor}" if tensor > 1 else str(parallel.shard)
        raise UserError(
            f"parallel.shard {product} does not divide the ranks of {fewer(refused)} nodes,"
            f" which resources.nodes allows ({ranks_per_node} ranks per node)",
            where=where,
            todo="use a shard that divides the ranks per node, or change resources.nodes",
        )


def _crossing(shard: int, ranks_per_node: int, tensor: int) -> list[Note]:
    """Groups of `shard` consecutive ranks, or tensor groups, stay inside their nodes where they divide a node's."""
    if ranks_per_node % shard == 0:
        return []
    largest = max(size for size in range(1, ranks_per_node + 1) if ranks_per_node % size == 0 and shard % size == 0)
    better = f"; parallel.shard {largest} would stay inside a node" if largest > 1 else ""
    text = (
        f"shard groups of {shard * tensor} ranks cross nodes of {ranks_per_node * tensor}: every forward and backward "
        f"pass sends parameters over the network, which is slow{better}"
    )
    return [Note("note", text)]


def _fitting(world: int) -> str:
    """The numbers that divide `world`, the smallest first, in words."""
    sizes = [str(size) for size in range(1, world + 1) if world % size == 0]
    *first, last = sizes if len(sizes) <= MANY else [*sizes[: MANY - 1], "...", sizes[-1]]
    return f"{', '.join(first)} or {last}" if first else last
