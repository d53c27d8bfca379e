"""Sums that travel with the gradients: exact for any values and any ranks."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slurmddp.runtime.parallel.carrier import MOST_RANKS, Carrier, decode, encode

numbers = st.one_of(
    st.floats(min_value=-(2.0**50), max_value=2.0**50, allow_subnormal=False), st.integers(-(2**40), 2**40).map(float)
)


def added(ranks: list[list[float]]) -> list[float]:
    """As an all-reduce of fp32 would add them up."""
    total = encode(ranks[0])
    for values in ranks[1:]:
        total = total + encode(values)
    return decode(total.tolist())


@given(st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=1, max_size=8))
def test_sums_are_exact(ranks: list[list[float]]) -> None:
    for place, result in enumerate(added(ranks)):
        exact = sum(Fraction(values[place]) for values in ranks)
        # Units of 2**-60, half of one lost a value, and float64 at the end.
        assert abs(Fraction(result) - exact) <= Fraction(len(ranks), 2**61) + abs(exact) * Fraction(1, 2**52)
    assert added(ranks[::-1]) == added(ranks), "the order of the ranks does not matter"


@pytest.mark.parametrize("value", [1.0, 255.0, 2.0**51 - 1, -(2.0**51) + 1, -(2.0**40) + 0.5, 1 / 3])
def test_the_most_ranks_add_up_without_rounding(value: float) -> None:
    (result,) = decode((encode([value]) * MOST_RANKS).tolist())
    assert result == pytest.approx(value * MOST_RANKS, rel=2**-52)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2.0**51, -(2.0**51)])
def test_what_cannot_be_written_is_nan_for_all_and_harms_no_other(value: float) -> None:
    first, second = added([[value, 2.0], [1.0, 3.0]])
    assert math.isnan(first) and second == 5.0


def test_it_is_fp32() -> None:
    assert encode([1.0, 2.0]).dtype == torch.float32


def test_the_room_adds_nothing_to_the_loss_and_has_the_load_for_its_gradient() -> None:
    model = torch.nn.Linear(2, 1)
    carrier = Carrier(model)
    parallel = carrier.module
    assert [name for name, _ in parallel.named_parameters()] == ["room", "model.weight", "model.bias"]
    for values in ([612.25, -3.0, 0.0], [1.0, 2.0]):
        loss = parallel(torch.ones(1, 2)).sum()
        carried = carrier.load(values)
        laden = carrier.laden(loss * 3.0)
        assert laden.item() == (loss * 3.0).item()
        laden.backward()
        carrier.unload()
        assert carried.wait() == values, "as alone"
        assert parallel.room.grad is not None and not parallel.room.grad.any(), "or it would count for the norm"
