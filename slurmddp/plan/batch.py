"""The arithmetic of the global batch: micro batch x accumulation x ranks per node x nodes."""

from __future__ import annotations

from typing import NamedTuple

from slurmddp.errors import UserError
from slurmddp.plan.model import BatchPlan, Layout, Note
from slurmddp.runtime import batch as dealing
from slurmddp.spec.job import Batch

DEFAULT_MICRO = 8


class Way(NamedTuple):
    """One way to reach the same global batch."""

    nodes: int
    ranks_per_node: int
    accumulation: int
    change: str


def plan_batch(wanted: Batch, layout: Layout, place: str) -> tuple[BatchPlan, list[Note]]:
    """Raises UserError where `batch.even` is true and the numbers do not divide. `place` names the key and file."""
    world = layout.world
    total, micro, steps = wanted.global_, wanted.micro, wanted.accumulation
    if total is None:
        micro = micro or DEFAULT_MICRO
        total = micro * (steps or 1) * world
    elif micro is None:
        micro = -(-total // (world * (steps or 1)))
    accumulation = dealing.accumulation(total, micro, world)
    even = dealing.is_even(total, micro, world)
    plan = BatchPlan(total, micro, accumulation, even)
    notes: list[Note] = []
    if not even:
        near = " and ".join(str(value) for value in nearest_even(total, micro, world))
        text = (
            f"a global batch of {total} is not micro batch {micro} x accumulation x {world} ranks: micro batches are"
            f" uneven, and correctly weighted; even ones nearby: {near}"
        )
        if wanted.even:
            raise UserError(
                text.split(":")[0],
                where=place,
                todo=f"batch.global {near.replace(' and ', ' or ')}, or batch.even: false",
            )
        notes.append(Note("note", text))
    if accumulation == 1 and layout.nodes > 1:
        notes.append(Note("note", "accumulation is already 1: more nodes no longer make a step of this batch faster"))
    if total < world:
        idle = world - total
        notes.append(Note("warning", f"a global batch of {total} leaves {idle} of {world} ranks without a sample"))
    return plan, notes


def nearest_even(total: int, micro: int, world: int) -> tuple[int, ...]:
    """The largest even global batch below `total` and the smallest above it, for this micro batch and world."""
    unit = micro * world
    below = total // unit * unit
    return tuple(value for value in (below, below + unit) if value > 0 and value != total)


def ways(plan: BatchPlan, layout: Layout, largest_nodes: int | None, largest_gpus: int | None) -> list[Way]:
    """Other (nodes, ranks per node, accumulation) of the same micro and global batch, the same or fewer samples a rank.

    largest_nodes, largest_gpus: nodes of a job and GPUs of a node that the partition has, where that is known.
    """
    if plan.total % plan.micro:
        return []
    slots = plan.total // plan.micro  # micro batches in one optimizer step, over all ranks
    found = []
    for factor_down in (4, 2):
        if layout.nodes % factor_down == 0:
            found.append((layout.nodes // factor_down, layout.ranks_per_node, "more accumulation"))
    for ranks in (layout.ranks_per_node * 2, layout.ranks_per_node * 4):
        if layout.gpus_per_node == 0 or largest_gpus is None or ranks <= largest_gpus:
            found.append((layout.nodes, ranks, "more GPUs a node" if layout.gpus_per_node else "more ranks a node"))
    for nodes in (layout.nodes * 2, layout.nodes * 4):
        if largest_nodes is None or nodes <= largest_nodes:
            found.append((nodes, layout.ranks_per_node, "more nodes"))
    return [
        Way(nodes, ranks, slots // (nodes * ranks), change)
        for nodes, ranks, change in found
        if slots % (nodes * ranks) == 0
    ]
