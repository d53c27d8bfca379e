"""Which ranks share what, for people: groups of the device mesh, and which of them stay inside a node."""

from __future__ import annotations

from collections.abc import Sequence

from slurmddp.job.plan.model import Plan
from slurmddp.job.train import Parallel
from slurmddp.shared import mesh

#: Groups of a dimension, and ranks of a group, that are shown before "...".
SHOWN = 4

_MEANING = {
    "FSDP": "all ranks together hold the model",
    "HSDP": "the ranks of a shard group together hold the model",
}


def parallel_lines(plan: Plan, wanted: Parallel) -> list[str]:
    """Return a line for the kind, and one per dimension with more than one rank; none for a script."""
    if plan.program.own:
        return []
    world, per_node = plan.nodes.world, plan.nodes.ranks_per_node
    if world is None or per_node is None:
        shape = f"shard {wanted.shard}" if wanted.replicate is None else f"{wanted.replicate} x {wanted.shard}"
        return [f"{'parallel':<20}{shape}, groups are formed when the job runs"] if wanted.shard > 1 else []
    sizes = mesh.sizes(world, wanted.replicate, wanted.shard)
    kind = mesh.kind(sizes)
    if kind == "DDP":
        return [f"{'parallel':<20}DDP: every rank holds the whole model"] if world > 1 else []
    product = " x ".join(f"{name} {size}" for name, size in sizes.items())
    lines = [f"{'parallel':<20}{kind}: {product}, {_MEANING[kind]}"]
    for name, groups in mesh.groups(sizes).items():
        if sizes[name] > 1:
            lines.append(f"{name + ' groups':<20}{_listed(groups)} ({_where(groups, per_node)})")
    return lines


def _listed(groups: Sequence[Sequence[int]]) -> str:
    """Return the first groups, and the number of all if there are more."""
    shown = " | ".join(_ranks(group) for group in groups[:SHOWN])
    return shown if len(groups) <= SHOWN else f"{shown} | ... {len(groups)} in all"


def _ranks(group: Sequence[int]) -> str:
    """Ranks of one group, which are evenly spaced: 0-7, or 0,8,16,24, or 0,8,...,504."""
    if len(group) > 2 and group[-1] - group[0] == len(group) - 1:
        return f"{group[0]}-{group[-1]}"
    if len(group) <= SHOWN:
        return ",".join(map(str, group))
    return f"{group[0]},{group[1]},...,{group[-1]}"


def _where(groups: Sequence[Sequence[int]], per_node: int) -> str:
    """Return how many groups stay inside a node of `per_node` consecutive ranks."""
    inside = sum(group[0] // per_node == group[-1] // per_node for group in groups)
    if inside == len(groups):
        return "inside a node" if inside == 1 else "each inside a node"
    if inside == 0:
        return "across nodes" if len(groups) == 1 else "each across nodes"
    return f"{inside} of {len(groups)} inside a node, the others across nodes"
