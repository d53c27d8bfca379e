"""Which ranks share what: the arithmetic of the device mesh.

Ranks fill the mesh in row-major order: the last dimension varies fastest, so that its groups are consecutive ranks
and stay inside a node where they can.
"""

from collections.abc import Mapping
from math import prod

REPLICATE, SHARD, TENSOR = "replicate", "shard", "tensor"


def sizes(world: int, replicate: int | None, shard: int, tensor: int = 1) -> dict[str, int]:
    """Return the mesh of a job by dimension, outermost first; `replicate` None is what the others leave of `world`.

    `tensor` is a dimension only where it is above 1.

    >>> sizes(8, None, 4)
    {'replicate': 2, 'shard': 4}

    Raises ValueError, with what to do, where the product is not the number of ranks.
    """
    if min(shard, tensor) < 1 or (replicate is not None and replicate < 1):
        given = f"{replicate}, {shard} and {tensor}"
        raise ValueError(f"parallel: replicate, shard and tensor must be at least 1, not {given}")
    inner = {TENSOR: tensor} if tensor > 1 else {}
    of = f" of tensor {tensor}" if inner else ""
    if replicate is None:
        for name, ranks, size in ((TENSOR, world, tensor), (SHARD, world // tensor, shard)):
            if ranks % size:
                within = of if name == SHARD else ""
                raise ValueError(
                    f"parallel.{name}: {ranks} {'groups' if within else 'ranks'}{within} cannot be divided into groups "
                    f"of {size}; use a divisor of {ranks}"
                )
        return {REPLICATE: world // (shard * tensor), SHARD: shard, **inner}
    if replicate * shard * tensor != world:
        raise ValueError(
            f"parallel: replicate {replicate} x shard {shard}{of.replace(' of', ' x')} is "
            f"{replicate * shard * tensor}, but the job has {world} ranks; remove replicate, which follows from the "
            f"others and the ranks"
        )
    return {REPLICATE: replicate, SHARD: shard, **inner}


def kind(mesh: Mapping[str, int]) -> str:
    """Return what the field calls it: "DDP", "FSDP" or "HSDP"; with a tensor dimension "TP", or "FSDP+TP"."""
    tensor = TENSOR in mesh
    if tensor and mesh[REPLICATE] * mesh[SHARD] == 1:
        return "TP"
    data = "DDP" if mesh[SHARD] == 1 else "FSDP" if mesh[REPLICATE] == 1 else "HSDP"
    return f"{data}+TP" if tensor else data


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
