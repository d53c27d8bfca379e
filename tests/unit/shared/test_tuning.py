"""slurmddp/shared/tuning.py: on recorded tables, and on a model whose noise scale is known exactly."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurmddp.records import tuning as records
from slurmddp.shared import tuning


@given(st.integers(0, 3000), st.integers(1, 3000))
def test_the_largest_that_fits_is_found_to_a_sixteenth(limit: int, most: int) -> None:
    tried: list[int] = []

    def fits(number: int) -> bool:
        tried.append(number)
        return number <= limit

    found, true = tuning.largest(fits, most), min(limit, most)
    assert found <= true <= found * (1 + 1 / 16) + 1
    assert (found == 0) == (true == 0)
    assert found == most or all(number <= most for number in tried)
    assert len(tried) == len(set(tried)) <= 18


def test_a_smaller_micro_batch_that_is_about_as_fast_is_taken() -> None:
    # Measured: lm on an H100, samples per second by micro batch.
    assert tuning.fast_enough({1: 97.0, 2: 181.0, 4: 322.0, 8: 391.0, 16: 402.0, 32: 399.0}) == 8
    assert tuning.fast_enough({4: 1.0}) == 4


@pytest.mark.parametrize(
    ("micro", "total", "ranks", "expected"), [(24, 512, 8, 22), (16, 512, 8, 16), (100, 512, 8, 64), (3, 7, 2, 2)]
)
def test_passes_are_about_equally_large(micro: int, total: int, ranks: int, expected: int) -> None:
    got = tuning.balanced(micro, total, ranks)
    share = -(-total // ranks)
    assert got == expected <= micro
    assert -(-share // got) == -(-share // micro)


def test_memory_is_the_sum_of_its_parts_and_is_sharded_but_for_activations() -> None:
    million = 1_000_000
    state = tuning.state_bytes(4 * million, "adamw", 0.9)
    assert tuning.memory(4 * million, state, 1000, 3) == (4 * million, 4 * million, 8 * million, 3000)
    assert tuning.memory(4 * million, state, 1000, 3, shard=4).total == 4 * million + 3000
    assert [tuning.state_bytes(8, "sgd", momentum) for momentum in (0.0, 0.9)] == [0, 8]


#: Samples per second by nodes: a fast network, and one over which two nodes are slower than one.
GOOD = {1: 100.0, 2: 196.0, 4: 372.0, 8: 500.0, 16: 540.0}
SLOW = {1: 100.0, 2: 62.0, 4: 70.0}


def test_efficiency_and_gain_of_a_recorded_table() -> None:
    rows = tuning.scaling(GOOD)
    assert [round(row.efficiency, 3) for row in rows] == [1.0, 0.98, 0.93, 0.625, 0.338]
    assert [row.gain and round(row.gain, 3) for row in rows] == [None, 0.96, 0.88, 0.32, 0.05]
    assert [round(row.efficiency, 2) for row in tuning.scaling({2: 180.0, 4: 342.0})] == [1.0, 0.95]


def test_beyond_which_number_of_nodes_another_buys_too_little() -> None:
    rows = tuning.scaling(GOOD)
    assert tuning.worthwhile(rows, 0.5) == (4, 8)
    assert tuning.worthwhile(rows, 0.9) == (2, 4)
    assert tuning.worthwhile(rows, 0.04) == (16, None)
    assert tuning.worthwhile(tuning.scaling(SLOW), 0.1) == (1, 2)
    assert tuning.worthwhile(tuning.scaling({1: 5.0}), 0.5) == (1, None)


def test_the_noise_scale_of_a_linear_regression_is_that_of_the_formula() -> None:
    """y = a.x + e with x and e normal: at w, with d = w - a, the gradient of a sample is x (x.d - e). Its mean is d,
    and the trace of its covariance (D + 1) |d|^2 + D s^2 in D dimensions, e having variance s^2.
    """
    generator = random.Random(7)
    d, noise, small, big = (0.6, -0.3, 0.2), 0.5, 8, 64
    square = sum(each * each for each in d)
    exact = (4 * square + 3 * noise**2) / square

    def gradient() -> list[float]:
        x = [generator.gauss(0, 1) for _ in d]
        residual = sum(a * b for a, b in zip(x, d, strict=True)) - generator.gauss(0, noise)
        return [each * residual for each in x]

    def mean(rows: list[list[float]]) -> list[float]:
        return [sum(column) / len(rows) for column in zip(*rows, strict=True)]

    def norm(row: list[float]) -> float:
        return sum(each * each for each in row)

    within = 0
    for _ in range(40):
        norms = []
        for _ in range(48):
            parts = [mean([gradient() for _ in range(small)]) for _ in range(big // small)]
            norms.append((sum(map(norm, parts)) / len(parts), norm(mean(parts))))
        found = tuning.noise_scale(norms, small, big)
        assert found.scale is not None and found.error is not None
        within += abs(found.scale - exact) < 2 * found.error
        assert found.scale == pytest.approx(exact, rel=0.5)
    assert within >= 33  # 95 % of 40, less what chance does


def test_a_gradient_that_cannot_be_told_from_noise_has_no_scale() -> None:
    assert tuning.noise_scale([(8.0, 1.0), (8.0, 1.0)], 1, 8).scale is None
    assert tuning.noise_scale([(8.0, 1.0), (8.0, 1.5)], 1, 8).scale is None  # one step alone decides
    with pytest.raises(ValueError, match="two steps"):
        tuning.noise_scale([(2.0, 1.0)], 1, 8)


@pytest.mark.parametrize(
    ("parts", "loader", "expected"),
    [
        ({"data": 0.01, "backward": 1.0, "network": 0.02}, 0.2, "compute"),
        ({"data": 0.01, "backward": 1.0, "network": 0.6}, 0.2, "network"),
        ({"data": 0.7, "backward": 1.0, "network": 0.6}, None, "data"),
        ({"data": 0.05, "backward": 1.0}, 1.4, "data"),
    ],
)
def test_what_is_the_limit(parts: dict[str, float], loader: float | None, expected: str) -> None:
    assert tuning.limit_first(parts, loader) == expected


def test_a_result_is_read_as_it_was_written() -> None:
    import json

    tuned = records.Tuned(
        "cpu", 64, 0.1, None, 4, 8, {"off": 3}, (records.Trial(1, False, True, 2.0, 3),),
        (records.Point(1, 2, 3.0, parts={"data": 0.1}),), 5.0, ((1.0, 0.5),), (1, 8), ("no limit",),
    )  # fmt: skip
    assert records.read(json.dumps(tuned.write())) == tuned
    assert records.read_order(records.Order(0.2, 5).text()) == (0.2, 5)
    with pytest.raises(ValueError, match="no result"):
        records.read('{"device": "cpu"}')
