"""The arithmetic of the global batch: micro batch x accumulation x ranks per node x nodes."""

from typing import NamedTuple

from slurmddp.errors import UserError
from slurmddp.job.plan.model import BatchPlan, Layout, NodePlan, Note
from slurmddp.job.train import Batch
from slurmddp.shared import batch as dealing

DEFAULT_MICRO = 8


class Way(NamedTuple):
    """One way to reach the same global batch."""

    nodes: int
    ranks_per_node: int
    accumulation: int
    change: str


def plan_batch(wanted: Batch, nodes: NodePlan, location: str) -> tuple[BatchPlan, list[Note]]:
    """The batch on nodes.max nodes; on fewer, down to nodes.min, global and micro batch are the same, and the
    accumulation follows.

    Raises UserError where `batch.even` is true and the numbers do not divide, on any number of nodes that may be.
    `location` names the key and file.
    """
    world = nodes.world
    if wanted.even and (world is None or wanted.weights):
        reason = "batch.weights make the shares uneven" if wanted.weights else "only the running job knows its ranks"
        todo = "remove it: every sample has the same weight either way"
        raise UserError(f"batch.even is true, but {reason}", where=location, todo=todo)
    if world is None:
        return _on_the_nodes(wanted, location)
    total, micro, steps = wanted.global_, wanted.micro, wanted.accumulation
    if total is None:
        micro = micro or DEFAULT_MICRO
        total = micro * (steps or 1) * world
    elif micro is None:
        micro = -(-total // (world * (steps or 1)))
    if wanted.weights:  # by names that are known on the nodes only, and with them the largest share
        return BatchPlan(total, micro, None, None), _idle(total, world)
    accumulation = dealing.accumulation(total, micro, world)
    even = dealing.is_even(total, micro, world)
    plan = BatchPlan(total, micro, accumulation, even)
    notes: list[Note] = []
    if not even:
        near = " and ".join(str(value) for value in nearest_even(total, micro, world))
        text = (
            f"a global batch of {total} is not micro batch {micro} x accumulation x {world} ranks: micro "
            f"batches are uneven (every sample weighs the same). Even batches nearby: {near}"
        )
        if wanted.even:
            todo = f"batch.global {near.replace(' and ', ' or ')}, or batch.even: false"
            raise UserError(text.split(":")[0], where=location, todo=todo)
        notes.append(Note("note", text))
    uneven = uneven_nodes(plan, nodes)
    if uneven and even:
        counts = fewer(uneven)
        if wanted.even:
            raise UserError(
                f"a global batch of {total} is not even on {counts} nodes, which resources.nodes allows",
                where=location,
                todo=f"resources.nodes without {counts}, another batch.global, or batch.even: false",
            )
        notes.append(Note("note", f"on {counts} nodes, micro batches are uneven (every sample weighs the same)"))
    if accumulation == 1 and nodes.max > 1 and not nodes.below_max:
        notes.append(Note("note", "accumulation is already 1: more nodes would not make a step faster"))
    return plan, notes + _idle(total, world)


def _on_the_nodes(wanted: Batch, location: str) -> tuple[BatchPlan, list[Note]]:
    """Plan for an unknown world size: the nodes compute accumulation from the global and micro batch."""
    if wanted.global_ is None or wanted.accumulation is not None:
        problem = "accumulation cannot be chosen" if wanted.accumulation else "batch.global is not set"
        raise UserError(
            f"{problem}: with ranks_per_node: auto, the number of ranks is known only when the job runs",
            where=location,
            todo="set batch.global and batch.micro; accumulation then follows from the ranks",
        )
    micro = wanted.micro or min(DEFAULT_MICRO, wanted.global_)
    notes = (
        [] if wanted.micro else [Note("note", f"batch.micro is not set: up to {micro} samples per rank and micro step")]
    )
    return BatchPlan(wanted.global_, micro, None, None), notes


def _idle(total: int, world: int) -> list[Note]:
    if total >= world:
        return []
    return [Note("warning", f"a global batch of {total} leaves {world - total} of {world} ranks without samples")]


def uneven_nodes(plan: BatchPlan, nodes: NodePlan) -> list[int]:
    """Numbers of nodes, below nodes.max, on which this batch does not divide evenly."""
    if nodes.ranks_per_node is None:
        return []
    ranks = nodes.ranks_per_node
    return [count for count in nodes.below_max if not dealing.is_even(plan.total, plan.micro, count * ranks)]


def fewer(counts: list[int]) -> str:
    """Some numbers in words: 3; 3 and 5; 3, 5, 6 and 12 more."""
    shown = [str(count) for count in counts[:3]]
    more = [f"{len(counts) - 3} more"] if len(counts) > 3 else []
    *first, last = [*shown, *more]
    return f"{', '.join(first)} and {last}" if first else last


def nearest_even(total: int, micro: int, world: int) -> tuple[int, ...]:
    """The largest even global batch below `total` and the smallest above it, for this micro batch and world."""
    unit = micro * world
    below = total // unit * unit
    return tuple(value for value in (below, below + unit) if value > 0 and value != total)


def ways(
    plan: BatchPlan, nodes: NodePlan, layout: Layout, largest_nodes: int | None, largest_gpus: int | None
) -> list[Way]:
    """Other (nodes, ranks per node, accumulation) with this micro and global batch, the same or fewer samples per rank.

    largest_nodes, largest_gpus: nodes of a job and GPUs of a node that the partition has, where that is known.
    """
    if plan.accumulation is None or nodes.ranks_per_node is None or plan.total % plan.micro:
        return []
    slots = plan.total // plan.micro  # micro batches in one optimizer step, over all ranks
    shapes = []
    for factor_down in (4, 2):
        if nodes.max % factor_down == 0:
            shapes.append((nodes.max // factor_down, nodes.ranks_per_node, "more accumulation"))
    for ranks in (nodes.ranks_per_node * 2, nodes.ranks_per_node * 4):
        if layout.gpus_per_node == 0 or largest_gpus is None or ranks <= largest_gpus:
            shapes.append((nodes.max, ranks, "more GPUs per node" if layout.gpus_per_node else "more ranks per node"))
    for count in (nodes.max * 2, nodes.max * 4):
        if largest_nodes is None or count <= largest_nodes:
            shapes.append((count, nodes.ranks_per_node, "more nodes"))
    return [
        Way(count, ranks, slots // (count * ranks), change)
        for count, ranks, change in shapes
        if slots % (count * ranks) == 0
    ]
