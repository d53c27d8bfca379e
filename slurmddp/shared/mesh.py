"""Which ranks share what: the arithmetic of the device mesh.

Ranks fill the mesh in row-major order: the last dimension varies fastest, so that its groups are consecutive ranks
and stay inside a node where they can. Further dimensions (tensor, pipeline) are further names in `sizes`.
"""

from collections.abc import Mapping
from math import prod

REPLICATE, SHARD = "replicate", "shard"


def sizes(world: int, replicate: int | None, shard: int) -> dict[str, int]:
    """Return the mesh of a job by dimension, outermost first; `replicate` None is what `world` and `shard` leave.

    >>> sizes(8, None, 4)
    {'replicate': 2, 'shard': 4}

    Raises ValueError, with what to do, where the product is not the number of ranks.
    """
    if shard < 1 or (replicate is not None and replicate < 1):
        raise ValueError(f"parallel: replicate and shard must be at least 1, not {replicate} and {shard}")
    if replicate is None:
        if world % shard:
            raise ValueError(
                f"parallel.shard: {world} ranks cannot be divided into groups of {shard}; use a divisor of {world}"
            )
        return {REPLICATE: world // shard, SHARD: shard}
    if replicate * shard != world:
        raise ValueError(
            f"parallel: replicate {replicate} x shard {shard} is {replicate * shard}, but the job has {world} "
            f"ranks; remove replicate, which follows from shard and the ranks"
        )
    return {REPLICATE: replicate, SHARD: shard}


def kind(mesh: Mapping[str, int]) -> str:
    """Return what the field calls it: "DDP", "FSDP" or "HSDP"."""
    if mesh[SHARD] == 1:
        return "DDP"
    return "FSDP" if mesh[REPLICATE] == 1 else "HSDP"


def groups(mesh: Mapping[str, int]) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return for each dimension the groups of ranks that differ in it alone, by their first rank.

    >>> groups({"replicate": 2, "shard": 2})
    {'replicate': ((0, 2), (1, 3)), 'shard': ((0, 1), (2, 3))}
    """
    names, lengths = list(mesh), list(mesh.values())
    world = prod(lengths)
    by_name: dict[str, tuple[tuple[int, ...], ...]] = {}
    for number, name in enumerate(names):
        stride = prod(lengths[number + 1 :])
        span = stride * lengths[number]
        firsts = (block + offset for block in range(0, world, span) for offset in range(stride))
        by_name[name] = tuple(tuple(range(first, first + span, stride)) for first in firsts)
    return by_name
