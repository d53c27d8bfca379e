"""Process groups in four dimensions: each rank in the right ones."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slurmddp.runtime import process_groups
from slurmddp.runtime.errors import UserError
from slurmddp.runtime.library.groups import DIMENSIONS, checked, members

from .harness import Ranks

MESHES = [
    sizes for sizes in product(range(1, 65), repeat=4) if sizes[0] * sizes[1] <= 64 and prod(sizes) <= 64
]  # fmt: skip


def test_all_meshes_up_to_64_ranks() -> None:
    """By the definition: ranks are in one group of a dimension if nothing but their place in it differs."""
    assert len(MESHES) > 1000
    for data, shard, pipeline, tensor in MESHES:
        sizes = {"data": data, "shard": shard, "pipeline": pipeline, "tensor": tensor}
        places = list(product(range(data), range(shard), range(pipeline), range(tensor)))  # of rank 0, 1, ...
        for dimension, name in enumerate(DIMENSIONS):
            groups: dict[tuple[int, ...], list[int]] = {}
            for rank, place in enumerate(places):
                groups.setdefault(place[:dimension] + place[dimension + 1 :], []).append(rank)
            assert sorted(members(sizes, name)) == sorted(groups.values()), sizes
        assert checked({**sizes, "data": None}, ["one"] * prod(sizes.values())) == sizes


@pytest.mark.parametrize(
    ("sizes", "nodes", "reason"),
    [
        ({"tensor": 4}, "aaabbb", "data 1 x shard 1 x pipeline 1 x tensor 4 is 4, but there are 6 ranks"),
        ({"data": 3}, "aabb", "is 3, but there are 4 ranks"),
        ({"data": 0, "tensor": 4}, "aabb", "is 0, but there are 4 ranks"),
        ({"tensor": 3}, "aabbcc", "tensor 3 puts ranks 0 to 2 on several nodes (a, b), with 2 ranks on each"),
        ({"tensor": 2}, "abab", "tensor 2 puts ranks 0 to 1 on several nodes (a, b)"),
        ({"shard": 2}, "aaab", "nodes differ (a 3, b 1)"),
        ({"pipeline": 2}, "aaab", "needs as many ranks on each node"),
    ],
)
def test_what_cannot_be_laid_out_is_refused(sizes: dict[str, int], nodes: str, reason: str) -> None:
    with pytest.raises(UserError) as refused:
        checked({"data": None, "shard": 1, "pipeline": 1, "tensor": 1, **sizes}, list(nodes))
    assert reason in str(refused.value)


def test_replicas_alone_may_be_on_uneven_nodes() -> None:
    assert checked({"data": None, "shard": 1, "pipeline": 1, "tensor": 1}, list("aaab"))["data"] == 4


@pytest.mark.ranks(8)
def test_each_rank_reaches_those_of_its_groups(ranks: Ranks) -> None:
    for rank, (sums, part, parts) in enumerate(ranks(8, _sums)):
        place = [rank >> shift & 1 for shift in (2, 1, 0)]  # shard, pipeline, tensor
        for sum_, shift in zip(sums[1:], (2, 1, 0), strict=True):
            assert sum_ == rank + (rank ^ 1 << shift), (rank, sums)
        assert (sums[0], part, parts) == (rank, place[0], 2)


def _sums(world: Any) -> tuple[list[int], int, int]:
    groups = process_groups(shard=2, pipeline=2, tensor=2)
    sums = []
    for name in DIMENSIONS:
        ranks = torch.tensor(dist.get_rank())
        dist.all_reduce(ranks, group=getattr(groups, name))
        sums.append(int(ranks))
    return sums, groups.part, groups.parts
