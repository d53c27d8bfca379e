"""Several real ranks: gradients, evaluation, the stream of samples, agreement on failures."""

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from slurmddp.runtime import job, optimizer
from slurmddp.runtime.checkpoint.state import Trained
from slurmddp.runtime.data import loading
from slurmddp.runtime.data.order import SampleOrder
from slurmddp.runtime.errors import UserError
from slurmddp.runtime.evaluation import evaluate
from slurmddp.runtime.measure.timing import StepTimer
from slurmddp.runtime.parallel.replicating import BucketSums
from slurmddp.runtime.parallel.wrap import wrap
from slurmddp.runtime.step import Outcome, StepFlags, Stepper
from slurmddp.runtime.tasks.protocol import Loss
from slurmddp.runtime.world import World

from . import toy
from .harness import Failed, Ranks, Run, make_job

NORMAL = {"train__optimizer__clip": None, "train__evaluate__at_end": False}


def model_of(task: toy.Toy) -> torch.nn.Module:
    torch.manual_seed(0)
    return task.build_model()


def prepared(
    joined: World,
    total: int,
    micro: int,
    precision: str = "fp32",
    *,
    task: toy.Toy | None = None,
) -> tuple[Stepper, torch.nn.Module, Iterator[loading.Micro]]:
    """What makes steps over the first global batches, the bare model, and this rank's micro batches."""
    wanted = job.parse(make_job(batch__global=total, batch__micro=micro, train__precision=precision, **NORMAL))
    task = task or toy.Toy({}, {})
    bare = model_of(task)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16", init_scale=256.0)
    together = wrap(bare, wanted, joined)
    trained = Trained(bare, optimizer.build(bare, wanted.train.optimizer), scaler)
    lists = loading.training_lists(
        SampleOrder(23, 1), start=0, steps=3, total=total, micro=micro, world=joined.size, rank=joined.rank
    )
    micros = loading.load(task, task.train_samples(), lists, rank=joined.rank, workers=0, pin_memory=False)
    return Stepper(joined, task, together, trained, wanted, StepTimer()), bare, micros


def gradients_of_step(joined: World, total: int, micro: int, precision: str) -> tuple[list[torch.Tensor], float, int]:
    """One step over the first global batch on all ranks: gradients, loss, targets."""
    stepper, bare, micros = prepared(joined, total, micro, precision)
    flags = StepFlags(stop=joined.rank == 1)
    [outcome] = stepper.run(micros, step=1, rate=0.0, flags=flags, before_update=lambda: None)
    assert outcome.flags == StepFlags(stop=joined.size > 1)
    gradients = [parameter.grad.clone() for parameter in bare.parameters() if parameter.grad is not None]
    return gradients, outcome.means["loss"], outcome.targets


def reference(total: int) -> tuple[list[torch.Tensor], float, int]:
    """The same in one process with the whole batch at once, in float64."""
    task = toy.Toy({}, {})
    model = model_of(task).double()
    rows = task.train_samples()
    data = torch.cat([rows[index] for index in SampleOrder(23, 1).ids(torch.arange(total))]).double()
    loss = (model(data)[:, 0] - data.sum(1)).square().mean()
    loss.backward()
    return (
        [parameter.grad for parameter in model.parameters() if parameter.grad is not None],
        loss.item(),
        len(data),
    )


#: Of seven samples: 1 to 4 ranks, 1 to 7 micro steps.
EVERY_SPLIT = [(world, 7, micro) for world in (1, 2, 3, 4) for micro in range(1, -(-7 // world) + 1)]


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("world", "total", "micro"), [(3, 2, 1), (2, 8, 3), (3, 30, 3), *EVERY_SPLIT])
def test_gradient_is_that_of_one_process(ranks: Ranks, world: int, total: int, micro: int) -> None:
    wanted, wanted_loss, wanted_count = reference(total)
    for gradients, loss, count in ranks(world, gradients_of_step, total, micro, "fp32"):
        assert count == wanted_count
        assert loss == pytest.approx(wanted_loss, rel=1e-6)
        ours, theirs = (torch.cat([part.flatten().double() for part in parts]) for parts in (gradients, wanted))
        assert (ours - theirs).norm() / theirs.norm() < 1e-6


@pytest.mark.ranks(2)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_reduced_precision_is_near(ranks: Ranks, precision: str) -> None:
    wanted, wanted_loss, _ = reference(7)
    gradients, loss, _ = ranks(2, gradients_of_step, 7, 2, precision)[0]
    assert loss == pytest.approx(wanted_loss, rel=0.02)
    for ours, theirs in zip(gradients, wanted, strict=True):
        assert (ours.double() - theirs).norm() / theirs.norm() < 0.03


def collectives_of_step(joined: World) -> tuple[int, int, int]:
    """Of the third step: buckets of gradients, collectives of all ranks' group, and of the coordination group.

    DDP exchanges more in the first two, to regroup its buckets.
    """
    buckets: list[int] = []
    stepper, _, micros = prepared(joined, 7, 2)
    begin = BucketSums.begin

    def count(sums: BucketSums, bucket: Any) -> Any:
        buckets.append(bucket.index())
        return begin(sums, bucket)

    groups = [dist.group.WORLD, joined.coordination]
    before = [0, 0]
    for step in (1, 2, 3):
        buckets.clear()
        before = [group._get_sequence_number_for_group() for group in groups]
        with mock.patch.object(BucketSums, "begin", count):
            stepper.run(micros, step=step, rate=0.0, flags=StepFlags(), before_update=lambda: None)
    world, coordination = (
        group._get_sequence_number_for_group() - count for group, count in zip(groups, before, strict=True)
    )
    return len(buckets), world, coordination


@pytest.mark.ranks(2)
def test_a_step_has_one_message_beside_its_gradients(ranks: Ranks) -> None:
    for buckets, world, coordination in ranks(2, collectives_of_step):
        assert (world, coordination) == (buckets, 1)


class Late(toy.Toy):
    """Rank 1's forward pass ends when rank 0 is in its backward pass, which makes the file `bucket`."""

    def __init__(self, late: bool, bucket: Path) -> None:
        super().__init__({}, {})
        self._late, self._bucket = late, bucket

    def loss(self, model: Callable[..., Any], batch: dict[str, torch.Tensor]) -> Loss:
        result = super().loss(model, batch)
        until = time.monotonic() + 60
        while self._late and not self._bucket.exists():
            assert time.monotonic() < until, "rank 0 waits for the sums before its backward pass"
            time.sleep(0.01)
        return result


def step_with_a_late_rank(joined: World, bucket: Path) -> Outcome:
    task = Late(joined.rank == 1, bucket)
    stepper, _, micros = prepared(joined, 2, 1, task=task)
    flags = StepFlags(stop=joined.rank == 1, save=joined.rank == 0)
    begin = BucketSums.begin

    def touch(sums: BucketSums, ready: Any) -> Any:
        bucket.touch()
        return begin(sums, ready)

    with mock.patch.object(BucketSums, "begin", touch):
        [outcome] = stepper.run(micros, step=1, rate=0.0, flags=flags, before_update=lambda: None)
    return outcome


@pytest.mark.ranks(2)
def test_the_backward_pass_does_not_wait_for_the_sums(ranks: Ranks, tmp_path: Path) -> None:
    one, other = ranks(2, step_with_a_late_rank, tmp_path / "bucket")
    assert one.flags == other.flags == StepFlags(stop=True, save=True)
    assert (one.means, one.targets, one.grad_norm) == (other.means, other.targets, other.grad_norm)


def futures_of_buckets(joined: World, begun: Path) -> list[bool]:
    """Whether DDP gets futures that are done already; rank 1 exchanges its bucket after rank 0 has begun to."""
    done: list[bool] = []
    begin = BucketSums.begin

    def look(sums: BucketSums, bucket: Any) -> Any:
        until = time.monotonic() + 60
        while joined.rank == 1 and not begun.exists() and time.monotonic() < until:
            time.sleep(0.01)
        future = begin(sums, bucket)
        done.append(future.done())
        begun.touch()
        return future

    stepper, _, micros = prepared(joined, 2, 1)
    with mock.patch.object(BucketSums, "begin", look):
        stepper.run(micros, step=1, rate=0.0, flags=StepFlags(), before_update=lambda: None)
    return done


@pytest.mark.ranks(2)
def test_no_callback_runs_in_gloos_thread(ranks: Ranks, tmp_path: Path) -> None:
    """With torch 2.4, one there may keep a process group from ending."""
    assert ranks(2, futures_of_buckets, tmp_path / "begun") == [[True], [True]]


def evaluations(joined: World) -> list[dict[str, float | int]]:
    task = toy.Toy({"validation": 11}, {})
    model = model_of(task)
    return [
        evaluate(
            joined,
            task,
            model,
            task.validation_samples(),
            count=count,
            micro=2,
            workers=0,
            precision=torch.float32,
        ).record()
        for count in range(1, 12)
    ]


@pytest.mark.ranks(3)
def test_evaluation_counts_each_sample_once(ranks: Ranks) -> None:
    task = toy.Toy({"validation": 11}, {})
    model, rows = model_of(task).eval(), task.validation_samples()
    for world in (1, 3):
        for records in ranks(world, evaluations):
            for count, record in enumerate(records, 1):
                with torch.no_grad():
                    data = torch.cat([rows[index] for index in range(count)])
                    loss = task.loss(model, {"rows": data})
                assert (record.samples, record.count_) == (count, len(data))
                assert record.loss == pytest.approx(loss.total.item() / len(data), rel=1e-6)
                assert record.figures["positive"] == loss.metrics["positive"][0].item() / len(data)


def expected_stream(first: int, last: int, length: int = 23, total: int = 5, seed: int = 3) -> dict[int, list[int]]:
    order = SampleOrder(length, seed)
    return {step: order.ids(torch.arange((step - 1) * total, step * total)) for step in range(first, last + 1)}


@pytest.mark.long  # test_exact.py shows it, too
@pytest.mark.ranks(3)
def test_the_same_stream_on_any_ranks_and_across_a_resume(ranks: Ranks, tmp_path: Path) -> None:
    """23 samples in batches of 5: steps 5 and 10 span two epochs, and the resume falls into the middle "
    "of one."""
    runs = {
        size: Run.create(tmp_path / str(size), train__steps=12, train__workers=int(size == 3)) for size in (1, 2, 3)
    }
    for size, run in runs.items():
        ranks.train(size, run)
        assert run.stream(0) == expected_stream(1, 12)
    resumed = Run.create(tmp_path / "resumed", train__steps=7, train__schedule__steps=12)
    ranks.train(2, resumed)
    Run.create(resumed.root, train__steps=12)
    ranks.train(3, resumed, attempt=1)
    assert resumed.stream(0) | resumed.stream(1) == expected_stream(1, 12)
    assert resumed.stream(1) == expected_stream(8, 12)
    event = resumed.events("resumed")[0]
    assert (event["step"], event["from_world"], event["random_states_restored"]) == (7, 2, False)
    assert [line["samples"] for line in resumed.lines("metrics.jsonl")][-1] == 60
    whole, parts = runs[1].losses(0), resumed.losses(0) | resumed.losses(1)
    assert parts == pytest.approx(whole, rel=1e-5)
    assert runs[2].losses(0) == pytest.approx(whole, rel=1e-5)
    assert resumed.marker(1)["validation"]["loss"] == pytest.approx(runs[1].marker()["validation"]["loss"], rel=1e-5)


@pytest.mark.ranks(3)
def test_more_ranks_than_samples_in_a_batch(ranks: Ranks, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", batch__global=2, train__steps=4)
    ranks.train(3, run)
    assert run.stream(0) == expected_stream(1, 4, total=2)


@pytest.mark.ranks(2)
def test_a_loss_that_is_not_finite_ends_the_run(ranks: Ranks, tmp_path: Path) -> None:
    poison = expected_stream(4, 4)[4][4]  # The last of step 4: rank 1's.
    run = Run.create(tmp_path / "run", train__data={"poison": poison})
    with pytest.raises(Failed) as caught:
        ranks.train(2, run)
    for name, message in caught.value.failures.values():
        assert name == "NotFiniteError"
        assert "step 4: the loss is not finite" in message
        assert "rank 1 on node1: loss nan" in message and str(poison) in message
    assert run.saved() == ["step-00000002"]
    assert not (run.root / "markers").exists()


def act(joined: World, kind: str) -> object:
    def action() -> int:
        if joined.rank == 1 and kind == "user":
            raise UserError("no such thing")
        if joined.rank == 1 and kind == "bug":
            raise KeyError("bug")
        return joined.rank

    return joined.together(action)


@pytest.mark.ranks(3)
def test_a_failure_on_one_rank_is_raised_on_all(ranks: Ranks) -> None:
    assert ranks(3, act, "none") == [0, 1, 2]
    with pytest.raises(Failed) as caught:
        ranks(3, act, "user")
    message = "no such thing (rank 1 on node1; 1 of 3 ranks failed)"
    assert caught.value.failures == dict.fromkeys(range(3), ("UserError", message))
    with pytest.raises(Failed) as caught:
        ranks(3, act, "bug")
    assert caught.value.failures[1][0] == "KeyError"
    assert caught.value.failures[0] == ("PeerError", "rank 1 on node1 failed: 'bug'")


@pytest.mark.ranks(2)
def test_images_on_scikit_learns_digits(ranks: Ranks, tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    datasets = pytest.importorskip("sklearn.datasets")
    digits = datasets.load_digits()
    numpy.savez(tmp_path / "digits.npz", images=digits.images, labels=digits.target)
    run = Run.create(
        tmp_path / "run",
        train__task="images",
        train__data={"path": str(tmp_path / "digits.npz")},
        train__model={"hidden": 64},
        train__steps=120,
        batch__global=64,
        batch__micro=32,
        train__log_every=20,
        train__evaluate__every_steps=60,
        checkpoint__every_steps=None,
    )
    ranks.train(2, run)
    validation = run.marker()["validation"]
    assert validation["accuracy"] > 0.9
    assert validation["count"] == validation["samples"] == math.floor(1797 * 0.2)
    assert [event["step"] for event in run.events("evaluated")] == [60, 120]
    assert 0 <= run.lines("metrics.jsonl")[-1]["accuracy"] <= 1


@pytest.mark.ranks(2)
def test_images_from_a_folder_of_classes(ranks: Ranks, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for number, name in enumerate(("dark", "light")):
        (tmp_path / "data" / name).mkdir(parents=True)
        for index in range(12):
            level = number * 200 + index
            image.new("L", (9, 7), level).save(tmp_path / "data" / name / f"{index}.png")
    run = Run.create(
        tmp_path / "run",
        train__task="images",
        train__data={"path": str(tmp_path / "data"), "size": 8, "validation_fraction": 0.25},
        train__model={"kind": "cnn", "hidden": 8},
        train__steps=30,
        batch__global=8,
        batch__micro=4,
    )
    ranks.train(2, run)
    assert run.marker()["validation"]["accuracy"] == 1.0
    assert run.marker()["validation"]["count"] == 6
