"""Process groups of a model that is parallel in several ways: which ranks share what."""

import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from slurmddp.runtime.errors import UserError
from slurmddp.runtime.library import shared

#: From the outermost to the innermost: neighbours in the last one have neighbouring ranks.
DIMENSIONS = ("data", "shard", "pipeline", "tensor")


class ProcessGroups(NamedTuple):
    """This rank's group in each dimension; one of a dimension of size 1 has this rank alone.

    Attributes:
        mesh: all ranks, with these four dimensions: for fully_shard (`mesh["data", "shard"]`), parallelize_module
            (`mesh["tensor"]`) and other functions of torch.
        data: replicas of the same part of the model, which exchange gradients.
        shard: ranks that share the parameters of one replica.
        pipeline: the stages, in their order.
        tensor: ranks that share each layer. They are on one node.
        part: which part of each global batch this rank takes, from 0: GlobalSampler(..., rank=part, ranks=parts).
        parts: how many there are, data x shard. Ranks that differ in pipeline or tensor alone take the same samples.
    """

    mesh: DeviceMesh
    data: dist.ProcessGroup
    shard: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    tensor: dist.ProcessGroup
    part: int
    parts: int


def process_groups(*, data: int | None = None, shard: int = 1, tensor: int = 1, pipeline: int = 1) -> ProcessGroups:
    """Return the groups of this rank in data x shard x pipeline x tensor; data: None takes the ranks that are left.

    Every rank must call it, with the same sizes, once the process group exists. Tensor groups are neighbouring ranks of
    one node, where the network is fastest; the next stage of a pipeline is the next such group; shards come next, and
    replicas, which exchange least often, lie furthest apart. Their collectives have torch's default timeout.

    >>> from slurmddp.runtime import process_groups
    >>> groups = process_groups(tensor=1)  # one rank alone
    >>> tuple(groups.mesh.shape), groups.tensor.size(), groups.part, groups.parts
    ((1, 1, 1, 1), 1, 0, 1)

    Raises:
        UserError: the sizes do not multiply to the number of ranks; a tensor group would span two nodes; or the nodes
            have different numbers of ranks, and more than `data` is above 1.
    """
    world = shared.get().world
    here = os.environ.get("SLURMDDP_NODE") or socket.gethostname()
    nodes = [here] * world.size
    if world.size > 1:
        dist.all_gather_object(nodes, here, group=world.coordination)
    given = {"data": data, "shard": shard, "pipeline": pipeline, "tensor": tensor}
    sizes = checked(given, nodes)
    mesh = init_device_mesh(world.device.type, tuple(sizes.values()), mesh_dim_names=DIMENSIONS)
    where = mesh.get_coordinate() or [0] * len(DIMENSIONS)
    part = where[0] * sizes["shard"] + where[1]
    groups = {name: mesh.get_group(name) for name in DIMENSIONS}
    return ProcessGroups(mesh=mesh, part=part, parts=sizes["data"] * sizes["shard"], **groups)


def checked(given: Mapping[str, int | None], nodes: Sequence[str], who: str = "process_groups") -> dict[str, int]:
    """Return the sizes, with that of `data`. nodes: the node of each rank. Raises UserError, see process_groups.

    who: what the message begins with.
    """
    ranks, others = len(nodes), prod(size or 1 for name, size in given.items() if name != "data")
    sizes = {name: size if size is not None else max(ranks // max(others, 1), 1) for name, size in given.items()}
    product = " x ".join(f"{name} {size}" for name, size in sizes.items())
    if min(sizes.values()) < 1 or prod(sizes.values()) != ranks:
        raise UserError(
            f"{who}: {product} is {prod(sizes.values())}, but there are {ranks} ranks: choose sizes whose "
            "product is the number of ranks, or leave data out",
            shared=True,
        )
    counts = Counter(nodes)
    if len(set(counts.values())) > 1 and ranks != sizes["data"]:
        named = ", ".join(f"{node} {count}" for node, count in list(counts.items())[:4])
        raise UserError(
            f"{who}: {product} needs as many ranks on each node, but nodes differ ({named}): use nodes of one "
            "kind, or data alone",
            shared=True,
        )
    for group in members(sizes, "tensor"):
        there = sorted({nodes[rank] for rank in group})
        if len(there) > 1:
            raise UserError(
                f"{who}: tensor {sizes['tensor']} puts ranks {group[0]} to {group[-1]} on several nodes "
                f"({', '.join(there)}), with {counts[there[0]]} ranks on each: choose a tensor size that divides that",
                shared=True,
            )
    return sizes


def members(sizes: Mapping[str, int], name: str) -> list[list[int]]:
    """Return the ranks of each group of a dimension. sizes: of all dimensions."""
    grid = torch.arange(prod(sizes.values())).reshape([sizes[each] for each in DIMENSIONS])
    groups: list[list[int]] = grid.movedim(DIMENSIONS.index(name), -1).reshape(-1, sizes[name]).tolist()
    return groups
