"""The endless order of samples."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmddp.runtime.data import loading
from slurmddp.runtime.data.order import SampleOrder
from slurmddp.shared import batch


def ids(order: SampleOrder, start: int, stop: int | None = None) -> list[int]:
    first, last = (0, start) if stop is None else (start, stop)
    return order.ids(torch.arange(first, last))


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 3000), st.integers(0, 2**40), st.integers(0, 5))
def test_each_epoch_is_a_permutation(length: int, seed: int, epoch: int) -> None:
    order = SampleOrder(length, seed)
    assert sorted(ids(order, epoch * length, (epoch + 1) * length)) == list(range(length))


def test_epochs_and_seeds_differ() -> None:
    order = SampleOrder(100, 1)
    first, second = ids(order, 100), ids(order, 100, 200)
    assert first != second != list(range(100))
    assert ids(SampleOrder(100, 2), 100) != first


def test_the_order_never_changes() -> None:
    """A run that resumes under another torch must find the same order: these numbers are a promise."""
    assert ids(SampleOrder(10, 0), 12) == [5, 9, 6, 8, 3, 1, 4, 2, 0, 7, 5, 8]
    assert ids(SampleOrder(10**15 + 7, 5), 10**15, 10**15 + 3) == [
        277486351770244,
        154339827508607,
        409952316245793,
    ]


@settings(deadline=None, max_examples=20)
@given(st.integers(5, 50), st.lists(st.integers(0, 400), min_size=1, max_size=4), st.integers(0, 40))
def test_any_slice_is_that_of_the_whole(length: int, starts: list[int], count: int) -> None:
    whole = ids(SampleOrder(length, 7), 500)
    order = SampleOrder(length, 7)
    for start in starts:
        assert ids(order, start, start + count) == whole[start : start + count]


def test_places_are_spread_evenly() -> None:
    """Over many epochs each sample comes to each tenth of the epoch about equally often."""
    length, epochs = 50, 400
    counts = [[0] * 10 for _ in range(length)]
    order = SampleOrder(length, 3)
    for epoch in range(epochs):
        for place, sample in enumerate(ids(order, epoch * length, (epoch + 1) * length)):
            counts[sample][place * 10 // length] += 1
    expected = epochs / 10
    chi_square = sum((count - expected) ** 2 / expected for row in counts for count in row)
    assert 350 < chi_square < 550  # 441 degrees of freedom, standard deviation 30.


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 5), st.integers(1, 6), st.integers(0, 99))
def test_any_ranks_load_the_same_stream(length: int, total: int, micro: int, world: int, start: int) -> None:
    whole = ids(SampleOrder(length, 1), start, start + 3 * total)
    loaded: list[list[int]] = [[], [], []]
    for rank in range(world):
        order = SampleOrder(length, 1)
        lists = loading.training_lists(order, start=start, steps=3, total=total, micro=micro, world=world, rank=rank)
        parts = batch.micro_batches(total, micro, world, rank)
        for step in loaded:
            for number, part in enumerate(parts):
                last = number == len(parts) - 1
                if part:
                    wanted = next(lists)
                    assert wanted.real and wanted.last == last
                    step += wanted.ids
                elif last:
                    wanted = next(lists)  # To take part in the exchange, with weight 0.
                    assert len(wanted.ids) == 1 and wanted.last and not wanted.real
        assert next(lists, None) is None
    assert [sample for step in loaded for sample in step] == whole


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 3), st.integers(0, 99))
def test_each_id_comes_with_its_epoch(length: int, total: int, world: int, start: int) -> None:
    order = SampleOrder(length, 1)
    for rank in range(world):
        lists = loading.training_lists(order, start=start, steps=4, total=total, micro=2, world=world, rank=rank)
        for wanted in lists:
            assert wanted.epochs is not None and wanted.seed == 1
            for index, epoch in zip(wanted.ids, wanted.epochs, strict=True):
                assert index in ids(order, epoch * length, (epoch + 1) * length)
                assert start // length <= epoch <= (start + 4 * total) // length
