"""The ranks of `slurmddp tune` (slurmddp/runtime/tune): real steps of the task lm, on CPUs."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from slurmddp.records import tuning as records
from slurmddp.records.tuning import REQUEST, RESULT, Order, Trial, Tuned
from slurmddp.report.tuning import judge
from slurmddp.runtime.tune import memory, steps, tuner
from slurmddp.shared import tuning

from .harness import Ranks, Run, torchrun, trainer

TEXT = "".join(f"{number} times {number} is {number * number}.\n" for number in range(4000))
MODEL = {"layers": 2, "heads": 2, "width": 64}


def lm(root: Path, order: Order, **changes: Any) -> Run:
    (root / "text").mkdir(parents=True)
    (root / "text/a.txt").write_text(TEXT)
    data = {"path": str(root / "text"), "context": 64}
    usual = {"train__task": "lm", "train__data": data, "train__model": MODEL, "batch__global": 16, "batch__micro": 2}
    run = Run.create(root, **{**usual, **changes})
    (root / REQUEST).write_text(order.text())
    return run


def measured(run: Run, size: int) -> Tuned:
    done = torchrun(run, size)
    assert done.returncode == 0, done.stdout + done.stderr
    return records.read((run.root / RESULT).read_text())


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Tuned]:
    run = lm(tmp_path_factory.mktemp("tune") / "run", Order())
    return run, measured(run, 2)


def test_two_ranks_measure_one_and_two_and_shards_with_the_same_global_batch(two: tuple[Run, Tuned]) -> None:
    run, found = two
    assert [(each.ranks, each.nodes, each.parallel) for each in found.points] == [
        (1, 1, "DDP"), (2, 1, "DDP"), (2, 1, "FSDP"),
    ]  # fmt: skip
    for point in found.points:
        assert point.samples_per_second > 0
        assert (
            point.micro * point.accumulation * point.ranks >= 16 > point.micro * (point.accumulation - 1) * point.ranks
        )
        assert {"forward", "backward", "optimizer"} <= set(point.parts)
        assert sum(point.parts.values()) == pytest.approx(16 / point.samples_per_second, rel=0.5)
        assert (point.all_reduce is None) == (point.ranks == 1)
    assert found.loader and found.loader > found.points[0].samples_per_second
    assert run.marker()["state"] == "done"
    assert not (run.root / "metrics.jsonl").exists()


def test_without_a_limit_of_memory_the_largest_is_not_claimed(two: tuple[Run, Tuned]) -> None:
    _, found = two
    assert found.limit is None and all(trial.fits for trial in found.trials)
    assert sorted({trial.micro for trial in found.trials}) == [1, 2, 4, 8, 16]  # the global batch of one rank
    assert {trial.recompute for trial in found.trials} == {False, True}
    assert any("not known: a CPU has no memory of its own" in note for note in found.notes)


def test_sizes_of_the_model_are_exact_and_checkpointing_keeps_less(two: tuple[Run, Tuned]) -> None:
    _, found = two
    width, layers = MODEL["width"], MODEL["layers"]
    block = 12 * width * width + 4 * width
    assert found.parameters == 4 * ((256 + 64) * width + layers * block + 2 * width)
    assert found.state == 2 * found.parameters
    assert 0 < found.activations["on"] < found.activations["off"] / 2


def test_the_noise_scale_has_a_scale_and_an_error(two: tuple[Run, Tuned]) -> None:
    _, found = two
    small, big = found.noise_batches
    assert big == 8 * 2 * small
    noise = tuning.noise_scale(found.noise, small, big)
    assert all(at_small > at_big > 0 for at_small, at_big in found.noise)
    assert noise.scale is not None and noise.error is not None and noise.scale > 0


@pytest.mark.long
def test_a_limit_of_memory_is_found_by_steps(tmp_path: Path) -> None:
    free = measured(lm(tmp_path / "free", Order(memory=10**12), batch__global=64), 1)
    torch_itself = 10**12 - (free.limit or 0)
    peaks = {each.micro: each.peak or 0 for each in free.trials if not each.recompute and each.fits}
    assert peaks[64] > peaks[16] > 0
    limit = torch_itself + int(1.15 * peaks[16])
    found = measured(lm(tmp_path / "run", Order(margin=0.1, memory=limit), batch__global=64), 1)
    assert found.limit == pytest.approx(1.15 * peaks[16], rel=0.2)
    tried = {each.micro: each for each in found.trials if not each.recompute}
    assert tried[4].fits and max(micro for micro, each in tried.items() if each.fits) < 64
    assert all(each.peak <= 0.9 * found.limit for each in found.trials if each.fits)
    assert found.notes == ()


@pytest.mark.long
def test_that_nothing_fits_is_said(tmp_path: Path) -> None:
    found = measured(lm(tmp_path / "run", Order(memory=1)), 1)
    assert found.points == () and not any(each.fits for each in found.trials)
    assert found.notes == ("not even a micro batch of 1 fits into the free memory of one rank",)


def test_what_runs_out_of_memory_is_told_from_other_errors() -> None:
    assert memory.is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"))
    assert not memory.is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


@pytest.mark.parametrize(
    ("trials", "ranks", "expected"),
    [
        (
            [Trial(1, False, True, 9.0, 1), Trial(2, False, True, 10.0, 2), Trial(4, False, True, 10.1, 3)],
            2,
            (2, False),
        ),
        ([Trial(1, False, True, 9.0, 1), Trial(2, False, False), Trial(8, True, True, 12.0, 1)], 1, (8, True)),
        ([Trial(8, False, True, 12.0, 1)], 16, (0, True)),
        ([Trial(1, False, False), Trial(1, True, False)], 1, (0, True)),
    ],
)
def test_the_choice_is_the_fastest_that_fits_and_that_a_rank_can_use(
    trials: list[Trial], ranks: int, expected: tuple[int, bool]
) -> None:
    assert tuner.choice(trials, 64, ranks) == expected


def test_which_numbers_of_ranks_are_measured() -> None:
    assert tuner._sizes(["a"] * 4) == [1, 2, 4]
    assert tuner._sizes(["a", "a", "b", "b", "c", "c"]) == [2, 4, 6]
    assert tuner._sizes(["a"]) == [1]


@pytest.mark.long
def test_a_loader_that_is_slower_than_a_step_is_named_as_the_limit(tmp_path: Path) -> None:
    found = measured(lm(tmp_path / "run", Order(), train__task="runtime.odd_text:create", batch__global=4), 1)
    assert found.loader is not None and found.loader < 50
    verdict = judge(found, 0.5)
    assert verdict.limit == "data"
    assert any(reason.startswith("the data loader is the limit") for reason in verdict.choice.reasons)


def test_running_out_of_memory_in_the_middle_of_a_backward_pass_ends_the_search_and_not_the_run(tmp_path: Path) -> None:
    found = measured(lm(tmp_path / "run", Order(), train__task="runtime.odd_text:greedy"), 1)
    for recompute in (False, True):
        tried = {each.micro: each.fits for each in found.trials if each.recompute == recompute}
        assert tried == {1: True, 2: True, 4: True, 8: False, 6: False, 5: True}
    assert [(each.ranks, each.micro <= 5) for each in found.points] == [(1, True)]
    assert found.noise and set(found.activations) == {"off", "on"}


def _norms(joined: Any, root: Path) -> tuple[Any, ...]:
    """The first step's norms, and the same from the gradient of each micro batch, computed alone."""
    session = trainer(joined, root).session
    found, small, big = steps.gradient_norms(session, 0.0)
    ids = session.order(0).samples(torch.arange(big))[0].tolist()
    parameters = list(session.parallel.module.parameters())
    gradients = []
    for start in range(0, big, small):
        samples = [session.data.train[index] for index in ids[start : start + small]]
        loss = session.data.task.loss(session.parallel.module, session.data.task.collate(samples))
        alone = torch.autograd.grad(loss.total / loss.count, parameters)
        gradients.append(torch.cat([each.flatten() for each in alone]).double())
    squares = torch.stack([each.square().sum() for each in gradients])
    return found[0], (float(squares.mean()), float(torch.stack(gradients).mean(0).square().sum())), small, big


def test_norms_are_those_of_the_gradients_of_the_same_samples(ranks: Ranks, tmp_path: Path) -> None:
    run = lm(tmp_path / "run", Order())
    for found, alone, small, big in ranks(2, _norms, run.root):
        assert found == pytest.approx(alone, rel=1e-4)
        assert (small, big) == (2, 2 * 8 * 2)


def _left(joined: Any, root: Path) -> int:
    session = trainer(joined, root).session
    one, two = (next(steps.same_again(session, micro, 1)) for micro in (1, 2))
    before = _results()
    assert memory.activations(session, one, two) > 0
    return _results() - before


def _results() -> int:
    """How many tensors belong to a graph: also those of tests before, in this process."""
    gc.collect()
    return sum(isinstance(each, torch.Tensor) and each.grad_fn is not None for each in gc.get_objects())


def test_looking_at_activations_leaves_none_of_them(ranks: Ranks, tmp_path: Path) -> None:
    """They kept the model alive: the next one did not fit beside it."""
    run = lm(tmp_path / "run", Order())
    assert ranks(1, _left, run.root) == [0]
