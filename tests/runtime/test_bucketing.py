"""Batches of samples of similar length, dealt out by length, on uneven ranks: still each sample exactly once."""

import json
import shutil
from array import array
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmddp.runtime import tasks
from slurmddp.runtime.data import loading
from slurmddp.runtime.data.order import ByLength, SampleOrder, aligned, as_tensor, window_origin
from slurmddp.runtime.errors import UserError
from slurmddp.shared import batch

from .harness import Ranks, Run

SEED = 4


def lengths_of(count: int, seed: int = 0) -> list[int]:
    random = Random(seed)
    return [random.randint(1, 30) for _ in range(count)]


def ids(order: SampleOrder, start: int, stop: int) -> list[int]:
    return order.ids(torch.arange(start, stop))


def by_length(length: int, total: int, batches: int, origin: int = 0) -> ByLength:
    return ByLength(length, SEED, lengths_of(length), total=total, batches=batches, origin=origin)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 200), st.integers(1, 12), st.integers(1, 9), st.integers(0, 50), st.integers(0, 6))
def test_a_window_holds_the_same_samples_sorted(
    length: int, total: int, batches: int, origin: int, window: int
) -> None:
    size = total * batches
    start = origin + window * size
    found = ids(by_length(length, total, batches, origin), start, start + size)
    assert Counter(found) == Counter(ids(SampleOrder(length, SEED), start, start + size))
    lengths = lengths_of(length)
    spans = sorted(
        (min(part), max(part)) for part in ([lengths[i] for i in found[b : b + total]] for b in range(0, size, total))
    )
    for (_, end), (begin, _) in pairwise(spans):
        assert end <= begin, "what is shorter is in an earlier batch of the sorted row"


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 100), st.integers(2, 9), st.integers(1, 7), st.lists(st.integers(0, 100), max_size=4))
def test_any_slice_is_that_of_the_whole(length: int, total: int, batches: int, starts: list[int]) -> None:
    whole = ids(by_length(length, total, batches), 0, 130)
    order = by_length(length, total, batches)
    for start in starts:
        assert ids(order, start, start + 30) == whole[start : start + 30]
    some = torch.tensor(sorted(starts), dtype=torch.int64)
    assert order.ids(some) == [whole[start] for start in sorted(starts)]


def test_the_order_by_length_never_changes() -> None:
    """A run that resumes under another torch must find the same order: these numbers are a promise."""
    order = ByLength(12, 0, [5, 1, 9, 9, 2, 7, 3, 3, 8, 6, 4, 1], total=2, batches=3)
    assert ids(order, 0, 14) == [8, 3, 9, 5, 1, 6, 7, 10, 11, 4, 0, 2, 10, 8]


def test_batches_of_a_window_do_not_come_by_length() -> None:
    """The shortest first in every window would be a rhythm that the learning rate does not know of."""
    lengths = torch.tensor(lengths_of(1000))
    order = by_length(1000, 10, 10)
    firsts, sorted_windows = [], 0
    for window in range(40):
        means = lengths[order.ids(torch.arange(window * 100, window * 100 + 100))].view(10, 10).double().mean(1)
        firsts.append(int(means.argmin()))
        sorted_windows += bool((means.diff() >= 0).all())
    assert sorted_windows == 0 and len(set(firsts)) > 5


splits = st.tuples(
    st.integers(1, 40),  # samples
    st.integers(1, 12),  # global batch
    st.integers(1, 5),  # micro
    st.lists(st.sampled_from([1, 2, 3, 0.5, 7]), min_size=1, max_size=6),
    st.one_of(st.none(), st.integers(1, 5)),  # by_length
    st.booleans(),  # lockstep
    st.integers(0, 9),  # first step
)


@settings(deadline=None, max_examples=60)
@given(splits)
def test_every_position_once_on_any_ranks(case: tuple[int, int, int, list[float], int | None, bool, int]) -> None:
    length, total, micro, given_weights, batches, lockstep, first = case
    order = SampleOrder(length, SEED) if batches is None else by_length(length, total, batches)
    start, steps, world = first * total, 3, len(given_weights)
    # `order` keeps a window between calls, and is shared by the ranks here: each goes through it from the start.
    whole = ids(order, start, start + steps * total)
    for weights in (None, tuple(given_weights)):
        seen: list[list[int]] = [[] for _ in range(steps)]
        for rank in range(world):
            lists = list(
                loading.training_lists(
                    order, start=start, steps=steps, total=total, micro=micro, world=world, rank=rank,
                    weights=weights, lockstep=lockstep,
                )
            )  # fmt: skip
            if lockstep:
                assert len(lists) == steps * batch.accumulation(total, micro, world, weights)
            assert [wanted.last for wanted in lists].count(True) == steps and lists[-1].last
            step = 0
            for wanted in lists:
                assert 1 <= len(wanted.ids) <= micro
                assert wanted.epochs is not None and len(wanted.epochs) == len(wanted.ids)
                if wanted.real:
                    seen[step] += wanted.ids
                else:
                    assert wanted.ids == whole[step * total : step * total + 1]
                step += wanted.last
        for step, samples in enumerate(seen):
            assert Counter(samples) == Counter(whole[step * total : (step + 1) * total])


def test_a_resume_on_other_ranks_in_mid_window_goes_on() -> None:
    """Stopped after 7 of 20 steps in windows of 5, on 3 ranks; continued on 2, the slow one with a third."""

    def stream(world: int, first: int, steps: int, weights: batch.Weights = None) -> list[list[int]]:
        seen: list[list[int]] = [[] for _ in range(steps)]
        for rank in range(world):
            lists = loading.training_lists(
                by_length(97, 12, 5), start=first * 12, steps=steps, total=12, micro=2, world=world, rank=rank,
                weights=weights,
            )  # fmt: skip
            step = 0
            for wanted in lists:
                seen[step] += wanted.ids
                step += wanted.last
        return [sorted(samples) for samples in seen]

    assert stream(3, 0, 7) + stream(2, 7, 13, (1, 2)) == stream(1, 0, 20)


def test_another_global_batch_needs_the_end_of_a_window() -> None:
    assert window_origin(36, saved=(4, 3, 0), total=4, by_length=3) == 0
    assert window_origin(36, saved=(4, 3, 0), total=5, by_length=3) == 36
    assert window_origin(40, saved=(4, 3, 4), total=4, by_length=None) == 40
    assert window_origin(37, saved=(4, None, 0), total=5, by_length=3) == 37
    assert aligned(36, 4, 3) and not aligned(40, 4, 3) and aligned(40, 4, 3, origin=4) and aligned(1, 4, None)
    message = (
        "cannot change to global 5, by_length 3 .* middle of 3 global batches .* Set global 4 .* train 2 more steps"
    )
    with pytest.raises(UserError, match=message):
        window_origin(40, saved=(4, 3, 0), total=5, by_length=3)
    with pytest.raises(UserError, match=r"train 1 more step$"):
        window_origin(44, saved=(4, 3, 0), total=4, by_length=2)


@pytest.mark.parametrize(("stopped", "loses"), [(36, False), (40, True)])
def test_that_rule_is_needed(stopped: int, loses: bool) -> None:
    """Going on with another global batch from `stopped` loses samples of an epoch of 60 just where it is refused."""
    before = ids(by_length(60, 4, 3), 0, stopped)
    after = ids(by_length(60, 6, 2, origin=stopped), stopped, 60)
    assert (sorted(before + after) != list(range(60))) == loses
    assert aligned(stopped, 4, 3) != loses


@pytest.mark.parametrize("kind", [array("H", [3, 1, 2]), array("Q", [3, 1, 2]), [3, 1, 2], (3, 1, 2), bytes([3, 1, 2])])
def test_lengths_come_in_any_array(kind: Any) -> None:
    assert as_tensor(kind).tolist() == [3, 1, 2]
    assert ids(ByLength(3, 0, kind, total=3, batches=1), 0, 3) == [1, 2, 0]


def test_an_array_of_lengths_is_not_copied() -> None:
    given_lengths = array("I", [1, 2, 3])
    assert as_tensor(given_lengths).data_ptr() == given_lengths.buffer_info()[0]


class Documents:
    """The `lm` task on documents of 1 to 90 characters, one line each."""

    def __init__(self, folder: Path, count: int = 300) -> None:
        random = Random(5)
        self.texts = ["".join(random.choices("abcdef ", k=random.randint(1, 90))) for _ in range(count)]
        for part in range(3):
            lines = [json.dumps({"text": text}) for text in self.texts[part * count // 3 : (part + 1) * count // 3]]
            (folder / f"part-{part}.jsonl").write_text("\n".join(lines) + "\n")
        self.data = {"path": str(folder), "glob": "*.jsonl", "format": "jsonl", "context": 64, "validation_fraction": 0}
        self.model = {"layers": 1, "heads": 2, "width": 16}
        self.task: Any = tasks.create("lm", self.data, self.model)

    def micros(self, batches: int | None, world: int = 2, rank: int = 0, steps: int = 18) -> Iterator[loading.Micro]:
        samples = self.task.train_samples()
        order = loading.order(self.task, len(samples), SEED, total=16, by_length=batches)
        lists = loading.training_lists(order, start=0, steps=steps, total=16, micro=4, world=world, rank=rank)
        return loading.load(self.task, samples, lists, rank=rank, workers=0, pin_memory=False)


def test_sorting_leaves_little_padding(tmp_path: Path) -> None:
    documents = Documents(tmp_path)

    def padding(batches: int | None) -> float:
        micros = [micro for rank in range(2) for micro in documents.micros(batches, rank=rank)]
        for micro in micros:
            tokens, lengths = micro.data
            assert (micro.filled, micro.computed) == (
                int(lengths.sum()) - len(lengths),
                len(tokens) * (tokens.shape[1] - 1),
            )
        return 1 - sum(micro.filled for micro in micros) / sum(micro.computed for micro in micros)

    assert padding(None) > 0.25
    assert padding(1) < 0.2, "sorted inside a global batch alone, on ranks that are to get equally much"
    assert padding(9) < 0.03


def test_ranks_get_equally_much(tmp_path: Path) -> None:
    documents = Documents(tmp_path)

    def loads(batches: int | None) -> list[list[int]]:
        """Tokens by step and rank."""
        result = [[0] * 4 for _ in range(18)]
        for rank in range(4):
            step = 0
            for micro in documents.micros(batches, world=4, rank=rank):
                result[step][rank] += micro.filled
                step += micro.last
        return result

    def over(batches: int | None) -> float:
        return sum(max(step) / (sum(step) / 4) for step in loads(batches)) / 18 - 1

    assert over(None) > 0.2
    assert over(1) < 0.05 and over(9) < 0.02


def test_by_length_wants_lengths_and_a_window_below_an_epoch(tmp_path: Path) -> None:
    toy = tasks.create("runtime.toy:create", {}, {})
    with pytest.raises(UserError, match="needs samples of different lengths"):
        loading.order(toy, 23, 0, total=4, by_length=2)
    task = Documents(tmp_path).task
    with pytest.raises(
        UserError, match="19 global batches of 16 samples are more than the 300 training samples; at most 18"
    ):
        loading.order(task, 300, 0, total=16, by_length=19)
    assert isinstance(loading.order(task, 300, 0, total=301, by_length=1), ByLength)
    task.lengths = lambda: [1, 2]
    with pytest.raises(UserError, match="has 300 training samples, but its method `lengths` gives 2"):
        loading.order(task, 300, 0, total=16, by_length=2)


def test_padding_changes_no_loss(tmp_path: Path) -> None:
    """Sums over a padded batch are those over its documents one by one, and so are the gradients."""
    documents = Documents(tmp_path, count=30)
    task, samples = documents.task, documents.task.train_samples()
    torch.manual_seed(0)
    model = task.build_model().double()
    whole = task.loss(model, task.collate([samples[index] for index in range(8)]))
    whole.total.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    single = [task.loss(model, task.collate([samples[index]])) for index in range(8)]
    sum(one.total for one in single).backward()
    assert (
        int(whole.count) == sum(int(one.count) for one in single) == sum(len(samples[index]) - 1 for index in range(8))
    )
    assert whole.total.item() == pytest.approx(sum(one.total.item() for one in single), rel=1e-6)
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.ranks(3)
def test_a_run_by_length_on_uneven_ranks_resumes_on_others(tmp_path: Path, ranks: Ranks) -> None:
    """Ten steps on 2 ranks, the second with two thirds of each batch; then from step 6, the middle of a window,
    again on 3, the second with half.
    """
    documents = Documents(tmp_path)
    run = Run.create(
        tmp_path / "run",
        train__task="lm",
        train__data=documents.data,
        train__model=documents.model,
        train__steps=10,
        batch__global=12,
        batch__micro=3,
        batch__by_length=4,
        batch__weights={"node1": 2},
        checkpoint__every_steps=6,
    )
    ranks.train(2, run)
    shutil.rmtree(run.checkpoint(10))
    ranks.train(3, run, attempt=1)
    order = ByLength(300, 3, documents.task.lengths(), total=12, batches=4)
    for attempt, first, shares in ((0, 1, [4, 8]), (1, 7, [3, 6, 3])):
        stream = run.stream(attempt)
        assert sorted(stream) == list(range(first, 11))
        for step, samples in stream.items():
            assert sorted(samples) == sorted(ids(order, step * 12 - 12, step * 12))
        for rank, count in enumerate(shares):
            lines = run.lines(f"trace/attempt-{attempt:03d}/rank-{rank:05d}.jsonl")
            assert [len(line["ids"]) for line in lines] == [count] * (11 - first)
    before, after = run.losses(0), run.losses(1)
    assert all(after[step] == pytest.approx(before[step], rel=1e-5) for step in range(7, 11))
