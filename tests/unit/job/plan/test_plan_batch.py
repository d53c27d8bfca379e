"""The arithmetic of the global batch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmddp.errors import UserError
from slurmddp.job.plan.batch import Way, nearest_even, plan_batch, ways
from slurmddp.job.plan.model import BatchPlan, Layout, NodePlan
from slurmddp.job.train import Batch
from tests.helpers import refusal


def node_plan(nodes: int = 1, ranks: int = 4) -> NodePlan:
    return NodePlan(nodes, nodes, 0, ranks)


def ways_of(
    made: BatchPlan, nodes: int, ranks: int, largest_nodes: int | None, largest_gpus: int | None, gpus: int = 4
) -> list[Way]:
    return ways(made, node_plan(nodes, ranks), Layout(gpus, None, None, 1), largest_nodes, largest_gpus)


def plan(nodes: int = 1, ranks: int = 4, **batch: int | bool) -> tuple[BatchPlan, list[str]]:
    made, notes = plan_batch(Batch.model_validate(batch), node_plan(nodes, ranks), "job.yaml:7: train.batch")
    return made, [note.text for note in notes]


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"global": 512, "micro": 16}, BatchPlan(512, 16, 4, True)),
        ({"global": 512, "accumulation": 2}, BatchPlan(512, 32, 2, True)),
        ({"micro": 16, "accumulation": 3}, BatchPlan(384, 16, 3, True)),
        ({"global": 512}, BatchPlan(512, 64, 1, True)),
        ({"micro": 16}, BatchPlan(128, 16, 1, True)),
        ({"accumulation": 2}, BatchPlan(128, 8, 2, True)),
        ({}, BatchPlan(64, 8, 1, True)),
        ({"global": 100, "micro": 16}, BatchPlan(100, 16, 1, False)),
        ({"global": 3, "micro": 16}, BatchPlan(3, 16, 1, False)),
    ],
)
def test_two_of_three_give_the_third(batch: dict[str, int], expected: BatchPlan) -> None:
    assert plan(nodes=2, ranks=4, **batch)[0] == expected


def test_accumulation_follows_from_the_nodes_and_the_global_batch_stays() -> None:
    for nodes, accumulation in ((1, 8), (2, 4), (4, 2), (8, 1)):
        made, _ = plan(nodes=nodes, ranks=4, **{"global": 512, "micro": 16})
        assert (made.total, made.accumulation) == (512, accumulation)


def test_an_uneven_batch_is_told_with_the_nearest_even_ones() -> None:
    made, notes = plan(ranks=3, **{"global": 64, "micro": 8})
    assert (made.even, made.accumulation) == (False, 3)
    assert "uneven (every sample weighs the same). Even batches nearby: 48 and 72" in notes[0]


def test_batch_even_refuses_an_uneven_one() -> None:
    with pytest.raises(UserError) as caught:
        plan(ranks=3, even=True, **{"global": 64, "micro": 8})
    assert refusal(caught.value).startswith("job.yaml:7: train.batch: a global batch of 64 is not micro batch 8")
    assert "batch.global 48 and 72" in refusal(caught.value) or "48 or 72" in refusal(caught.value)
    assert plan(ranks=4, even=True, **{"global": 64, "micro": 8})[0].even


def test_more_nodes_no_longer_help_at_accumulation_1() -> None:
    def told(nodes: int, total: int) -> bool:
        return any(
            "accumulation is already 1" in text for text in plan(nodes=nodes, **{"global": total, "micro": 8})[1]
        )

    assert told(2, 64)
    assert not told(2, 128)


def test_ranks_without_a_sample_are_told() -> None:
    assert "leaves 2 of 8 ranks without samples" in plan(nodes=2, **{"global": 6, "micro": 8})[1][-1]


@given(st.integers(1, 5000), st.integers(1, 64), st.integers(1, 128))
def test_the_nearest_even_ones_are_even_and_nearest(total: int, micro: int, world: int) -> None:
    even = [value for value in range(1, total + micro * world + 1) if value % (micro * world) == 0 and value != total]
    below, above = [v for v in even if v < total][-1:], [v for v in even if v > total][:1]
    if total % (micro * world):
        assert list(nearest_even(total, micro, world)) == below + above


@given(
    st.integers(1, 64), st.sampled_from([1, 2, 3, 4, 8]), st.integers(1, 64), st.integers(1, 16), st.integers(1, 128)
)
def test_every_way_reaches_the_same_global_batch(
    nodes: int, ranks: int, micro: int, accumulation: int, most: int
) -> None:
    made, _ = plan_batch(Batch(micro=micro, accumulation=accumulation), node_plan(nodes, ranks), "")
    for way in ways_of(made, nodes, ranks, most, 8):
        assert micro * way.accumulation * way.ranks_per_node * way.nodes == made.total
        assert way.accumulation >= 1
        assert way.nodes <= max(most, nodes)
        assert (way.nodes, way.ranks_per_node) != (nodes, ranks)


def test_the_ways() -> None:
    made, _ = plan(nodes=2, ranks=2, **{"global": 64, "micro": 4})
    found = [(way.change, way.nodes, way.ranks_per_node, way.accumulation) for way in ways_of(made, 2, 2, None, 4)]
    assert found == [
        ("more accumulation", 1, 2, 8),
        ("more GPUs per node", 2, 4, 2),
        ("more nodes", 4, 2, 2),
        ("more nodes", 8, 2, 1),
    ]
    assert not [way for way in ways_of(made, 2, 2, None, 2) if way.change == "more GPUs per node"]
    assert [way.ranks_per_node for way in ways_of(made, 2, 2, 2, None, gpus=0)] == [2, 4, 8]


def test_an_uneven_batch_has_no_ways() -> None:
    assert ways_of(BatchPlan(100, 16, 1, False), 2, 4, None, None) == []
