"""The arithmetic of dealing out a global batch."""

import subprocess
import sys
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmddp.shared import batch

from .harness import PATIENCE, ROOT

sizes = st.integers(1, 300)
worlds = st.integers(1, 40)
weights = st.lists(st.one_of(st.integers(1, 9), st.floats(0.01, 100)), min_size=1, max_size=12).map(tuple)


@given(sizes, worlds)
def test_split_is_complete_and_level(total: int, parts: int) -> None:
    result = batch.split(total, parts)
    assert len(result) == parts and sum(result) == total
    assert max(result) - min(result) <= 1


@given(sizes, worlds)
def test_shares_are_the_global_batch_in_order(total: int, world: int) -> None:
    shares = [batch.share(total, world, rank) for rank in range(world)]
    assert [position for part in shares for position in part] == list(range(total))
    assert tuple(map(len, shares)) == batch.split(total, world)


@given(sizes, st.integers(1, 50), worlds)
def test_every_sample_is_in_one_micro_batch(total: int, micro: int, world: int) -> None:
    steps = batch.accumulation(total, micro, world)
    dealt = [batch.micro_batches(total, micro, world, rank) for rank in range(world)]
    assert [position for rank in dealt for part in rank for position in part] == list(range(total))
    for rank in dealt:
        lengths = list(map(len, rank))
        assert len(lengths) == steps
        assert max(lengths) <= micro and max(lengths) - min(lengths) <= 1
        assert lengths == sorted(lengths), "empty micro batches come first, so that the last one can carry the exchange"


@given(st.integers(1, 50), worlds, st.integers(1, 20))
def test_even_numbers_stay_even(micro: int, world: int, steps: int) -> None:
    total = micro * world * steps
    assert batch.accumulation(total, micro, world) == steps
    assert batch.is_even(total, micro, world)
    assert set(map(len, batch.micro_batches(total, micro, world, world - 1))) == {micro}
    assert batch.is_even(total + 1, micro, world) == (micro * world == 1)


def test_more_ranks_than_samples() -> None:
    assert batch.micro_batches(2, 4, 3, 1) == (range(1, 2),)
    assert batch.micro_batches(2, 4, 3, 2) == (range(2, 2),)


@pytest.mark.parametrize("arguments", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_numbers_below_one_are_refused(arguments: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        batch.accumulation(*arguments)


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(ValueError, match="rank must be between 0 and 2"):
        batch.share(5, 3, 3)


@given(sizes, weights)
def test_weighted_shares_are_the_global_batch_in_order(total: int, given: tuple[float, ...]) -> None:
    shares = [batch.share(total, len(given), rank, given) for rank in range(len(given))]
    assert [position for part in shares for position in part] == list(range(total))
    for part, weight in zip(shares, given, strict=True):
        assert abs(len(part) - total * weight / sum(given)) < 1 + 1e-6, "the quota, rounded up or down"


@given(sizes, st.integers(1, 50), weights, st.booleans())
def test_with_weights_every_sample_is_in_one_micro_batch(
    total: int, micro: int, given: tuple[float, ...], lockstep: bool
) -> None:
    world = len(given)
    steps = batch.accumulation(total, micro, world, given)
    dealt = [batch.micro_batches(total, micro, world, rank, given, lockstep=lockstep) for rank in range(world)]
    assert [position for rank in dealt for part in rank for position in part] == list(range(total))
    assert max(sum(map(bool, rank)) for rank in dealt) == steps, "the busiest rank uses them all"
    for rank in dealt:
        lengths = list(map(len, rank))
        assert len(lengths) == steps and max(lengths) <= micro and lengths == sorted(lengths)
        full = -(-sum(lengths) // micro)
        assert sum(map(bool, lengths)) == (min(steps, sum(lengths)) if lockstep else full)


@given(sizes, worlds, st.sampled_from([1, 2.5, 1e-3]))
def test_equal_weights_are_none(total: int, world: int, weight: float) -> None:
    assert batch.shares(total, world, (weight,) * world) == batch.split(total, world)


def test_weights_are_meant_as_they_are_written() -> None:
    assert batch.apportion(3, (0.1, 0.2)) == (1, 2)
    assert batch.apportion(100, (1, 1, 2, 4)) == (13, 12, 25, 50)
    assert batch.apportion(2, (1, 1, 1, 100)) == (0, 0, 0, 2)
    assert batch.is_even(12, 4, 2, (1, 2)) is False and batch.is_even(12, 4, 3, (1, 1, 1))


@pytest.mark.parametrize("bad", [(1, 0), (1, -2), (1, float("nan")), (1, float("inf")), (True, 1), ("2", 1), ()])
def test_weights_that_are_none_are_refused(bad: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=r"a weight must be a number above 0|at least one weight"):
        batch.apportion(5, bad)
    with pytest.raises(ValueError, match="one weight for each of 3 ranks, not 2"):
        batch.share(5, 3, 0, (1, 2))


def test_weights_by_node_or_device() -> None:
    who = [("big1", "NVIDIA H100 80GB"), ("big1", "NVIDIA H100 80GB"), ("old7", "Tesla V100"), ("odd", "cpu")]
    assert batch.weights_of({}, who) is None
    assert batch.weights_of({"none*": 3}, who) is None
    assert batch.weights_of({"*": 3}, who) is None, "the same for all"
    assert batch.weights_of({"*H100*": 3, "old*": 0.5}, who) == (3, 3, 0.5, 1)
    assert batch.weights_of({"old7": 2, "*V100": 9}, who) == (1, 1, 2, 1), "the first pattern that fits"
    assert batch.weights_of({"*h100*": 3}, who) is None, "upper and lower case"
    assert batch.unused_patterns({"*h100*": 3, "odd": 2, "old": 2}, who) == ["*h100*", "old"]
    with pytest.raises(ValueError, match=r"'old\*': a weight must be a number above 0, not '2'"):
        batch.weights_of({"old*": "2"}, who)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=80), st.data())
def test_balanced_dealing_gives_each_its_share(lengths: list[int], data: st.DataObject) -> None:
    sizes = batch.apportion(len(lengths), data.draw(weights))
    dealt = batch.balanced(lengths, sizes)
    assert tuple(map(len, dealt)) == sizes
    assert sorted(place for places in dealt for place in places) == list(range(len(lengths)))
    for places in dealt:
        assert [lengths[place] for place in places] == sorted(lengths[place] for place in places)


def test_balanced_dealing_is_level() -> None:
    """The rank with most to do decides how long a step takes: close to the mean here, and not if dealt in order."""
    random = Random(1)
    over, in_order = [], []
    for _ in range(100):
        lengths = [int(random.paretovariate(1.2) * 20) % 2000 + 1 for _ in range(64)]
        loads = [sum(lengths[place] for place in places) for places in batch.balanced(lengths, (8,) * 8)]
        least = max(sum(lengths) / 8, max(lengths) + sum(sorted(lengths)[:7]))
        over.append(max(loads) / least)
        in_order.append(max(sum(lengths[start : start + 8]) for start in range(0, 64, 8)) / (sum(lengths) / 8))
    assert sum(over) / 100 < 1.1 < 1.5 < sum(in_order) / 100


def test_balanced_dealing_follows_the_weights() -> None:
    loads = [sum(places) for places in batch.balanced(list(range(300)), (50, 100, 150))]
    whole = sum(range(300))
    assert [round(load / whole, 2) for load in loads] == [0.17, 0.33, 0.5]


def test_what_needs_no_torch_imports_none() -> None:
    names = [
        "shared.batch",
        "shared.mesh",
        "runtime.job",
        "shared.run_folder",
        "shared.checkpoint.layout",
        "shared.task_options",
        "runtime.environment",
        "runtime.errors",
        "runtime.journal",
        "runtime.watch.stop",
        "runtime.watch.marker",
    ]
    code = "".join(f"import slurmddp.{name}\n" for name in names)
    code += "import sys; sys.exit([name for name in ('torch', 'numpy', 'PIL') if name in sys.modules] or 0)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=PATIENCE)
