"""Sums that travel with the gradients: exact for any values and any ranks."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slurmddp.runtime.parallel.carrier import MOST_RANKS, Carrier, decode, encode

numbers = st.one_of(
    st.floats(min_value=-(2.0**47), max_value=2.0**47, allow_subnormal=False), st.integers(-(2**40), 2**40).map(float)
)


def added(ranks: list[list[float]]) -> list[float]:
    """As an all-reduce of fp32 would add them up."""
    total = encode(ranks[0])
    for values in ranks[1:]:
        total = total + encode(values)
    return decode(total)


@given(st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=1, max_size=8))
def test_sums_are_exact(ranks: list[list[float]]) -> None:
    for place, result in enumerate(added(ranks)):
        exact = sum(Fraction(values[place]) for values in ranks)
        # Units of 2**-60, half of one lost a value, and float64 at the end.
        assert abs(Fraction(result) - exact) <= Fraction(len(ranks), 2**61) + abs(exact) * Fraction(1, 2**52)
    assert added(ranks[::-1]) == added(ranks), "the order of the ranks does not matter"


@pytest.mark.parametrize("value", [1.0, 4095.0, 2.0**47 - 1, -(2.0**40) + 0.5, 1 / 3])
def test_the_most_ranks_add_up_without_rounding(value: float) -> None:
    (result,) = decode(encode([value]) * MOST_RANKS)
    assert result == pytest.approx(value * MOST_RANKS, rel=2**-52)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2.0**48])
def test_what_cannot_be_written_is_nan_for_all_and_harms_no_other(value: float) -> None:
    first, second = added([[value, 2.0], [1.0, 3.0]])
    assert math.isnan(first) and second == 5.0


def test_it_is_fp32() -> None:
    assert encode([1.0, 2.0]).dtype == torch.float32


def test_it_goes_with_the_smallest_bucket_and_always_once() -> None:
    carrier = Carrier()
    for sizes, expected in [([40, 30, 20], 0), ([40, 30, 20], 2), ([10, 9, 8, 9], 2), ([7, 9], 1), ([7, 9], 0)]:
        carrier.load([1.0])
        taken = [carrier.take(number, size, number == len(sizes) - 1) for number, size in enumerate(sizes)]
        assert [number for number, load in enumerate(taken) if load is not None] == [expected]
