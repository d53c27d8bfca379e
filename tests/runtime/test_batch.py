"""The arithmetic of dealing out a global batch."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmddp.runtime import batch

from .harness import ROOT

sizes = st.integers(1, 300)
worlds = st.integers(1, 40)


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


def test_the_login_side_can_import_it_without_torch() -> None:
    names = [
        "batch",
        "job",
        "folder",
        "checkpoint.layout",
        "environment",
        "errors",
        "journal",
        "schedule",
        "stop",
    ]
    code = "".join(f"import slurmddp.runtime.{name}\n" for name in names)
    code += "import sys; sys.exit([name for name in ('torch', 'numpy', 'PIL') if name in sys.modules] or 0)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=30)
