"""The same samples on any ranks, the same bits on the same ranks; what is not finite, and replicas that differ."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from slurmddp.runtime.errors import ReplicasDifferError
from slurmddp.runtime.parallel.replicas import Agreement, fingerprint
from slurmddp.runtime.world import World

from .harness import Failed, Ranks, Run, torchrun
from .saving import load as weights
from .test_checkpoint import same
from .test_ranks import expected_stream

LONG: dict[str, Any] = {
    "train__steps": 9,
    "checkpoint__every_steps": 2,
    "checkpoint__keep": 10,
    "train__schedule__steps": 9,
}


@pytest.mark.parametrize(
    ("killed_at", "sizes"),
    [
        pytest.param(3, (1, 3, 4), marks=pytest.mark.ranks(4)),
        pytest.param(7, (1, 2, 3, 4, 6), marks=(pytest.mark.ranks(6), pytest.mark.long)),
    ],
)
def test_killed_on_four_ranks_it_goes_on_on_any_number(
    ranks: Ranks, tmp_path: Path, killed_at: int, sizes: tuple[int, ...]
) -> None:
    """SIGKILL on one of four ranks in the middle of an epoch; the rest on other numbers: the stream is that of a run
    which nobody disturbed, and so are loss and weights.
    """
    data = {"train": 41}  # An epoch ends in step 9: until then every sample comes once.
    stream = expected_stream(1, 9, length=41)
    whole = Run.create(tmp_path / "whole", train__data=data, **LONG)
    ranks.train(4, whole)
    assert whole.stream(0) == stream
    broken = Run.create(tmp_path / "broken", train__data=data | {"kill": stream[killed_at][-1]}, **LONG)
    done = torchrun(broken, 4)
    assert done.returncode == 1 and "Signal 9" in done.stderr
    assert not (broken.root / "markers").exists()
    before = broken.stream(0)
    for size in sizes:
        rest = Run.create(tmp_path / str(size), train__data=data, **LONG)
        shutil.copytree(broken.root / "checkpoints", rest.root / "checkpoints")
        ranks.train(size, rest, attempt=1)
        first = rest.events("resumed")[0]["step"] + 1 if rest.events("resumed") else 1
        assert first <= killed_at
        assert {step: before[step] for step in range(1, first)} | rest.stream(1) == stream
        theirs = {step: loss for step, loss in whole.losses(0).items() if step >= first}
        if size == 4:
            assert rest.losses(1) == theirs
            assert same(weights(whole.checkpoint(9)), weights(rest.checkpoint(9)))
        else:
            assert rest.losses(1) == pytest.approx(theirs, rel=1e-5)


@pytest.mark.ranks(3)
def test_two_hundred_steps_on_three_ranks_and_on_two(ranks: Ranks, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "train__steps": 200, "checkpoint__every_steps": None, "batch__global": 7, "train__optimizer__lr": 1e-3,
        "train__log_every": 20,
    }  # fmt: skip
    runs = {size: Run.create(tmp_path / str(size), **settings) for size in (3, 2)}
    for size, run in runs.items():
        ranks.train(size, run)
    three, two = runs[3], runs[2]
    assert two.losses(0) == pytest.approx(three.losses(0), rel=1e-5)
    one, other = weights(three.checkpoint(200)), weights(two.checkpoint(200))
    for name, value in one.items():
        if name.startswith("model."):
            assert (other[name] - value).norm() <= 1e-5 * value.norm(), name


@pytest.mark.ranks(2)
def test_deterministic_gives_the_same_bits_twice(ranks: Ranks, tmp_path: Path) -> None:
    runs = [
        Run.create(tmp_path / name, train__deterministic=True, train__model={"dropout": 0.3}) for name in ("a", "b")
    ]
    for run in runs:
        ranks.train(2, run)
    first, second = runs
    assert first.losses(0) == second.losses(0)
    assert same(weights(first.checkpoint(6)), weights(second.checkpoint(6)))
    other = Run.create(tmp_path / "c", train__deterministic=True, train__model={"dropout": 0.3}, train__seed=4)
    ranks.train(2, other)
    assert other.losses(0) != first.losses(0), "the comparison could not fail"


POISONED = expected_stream(4, 4)[4][4]  # The last sample of step 4: the last rank's.


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", ["poison", "poison_gradient"])
def test_what_is_not_finite_is_named_and_stops(ranks: Ranks, tmp_path: Path, what: str) -> None:
    run = Run.create(tmp_path / "run", train__data={what: POISONED})
    with pytest.raises(Failed) as caught:
        ranks.train(2, run)
    for name, message in caught.value.failures.values():
        assert name == "NotFiniteError"
        assert "step 4" in message and "rank 1 on node1" in message and str(POISONED) in message
    assert run.saved() == ["step-00000002"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", ["poison", "poison_gradient"])
def test_what_is_not_finite_can_be_skipped(ranks: Ranks, tmp_path: Path, what: str) -> None:
    run = Run.create(tmp_path / "run", train__data={what: POISONED}, train__on_nonfinite="skip", checkpoint__keep=9)
    run3 = Run.create(tmp_path / "three", train__steps=3, train__schedule__steps=6, checkpoint__every_steps=3)
    output = ranks.train(2, run)
    ranks.train(2, run3)
    (event,) = run.events("step_skipped")
    assert event["step"] == 4 and "rank 1 on node1" in event["why"] and str(POISONED) in event["why"]
    assert "step 4" in output
    assert run.marker()["step"] == 6
    untouched, after = weights(run3.checkpoint(3)), weights(run.checkpoint(4))
    assert same(untouched, after), "the skipped step changed the weights"
    assert all(torch.isfinite(value).all() for value in weights(run.checkpoint(6)).values())


@pytest.mark.ranks(2)
def test_under_fp16_the_scale_is_halved(ranks: Ranks, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", train__data={"poison_gradient": POISONED}, train__precision="fp16")
    plain = Run.create(tmp_path / "plain", train__precision="fp16")
    ranks.train(2, run)
    ranks.train(2, plain)
    skipped = [[event["step"] for event in each.events("step_skipped")] for each in (run, plain)]
    assert skipped[0] == [*skipped[1], 4], "the scale finds its place in the first steps of both"
    scales = [float(weights(each.checkpoint(6))["scaler.scale"]) for each in (run, plain)]
    assert scales[0] == scales[1] / 2


def disturbed(joined: World, root: Path) -> None:
    """A run in which rank 1's memory changes by itself after step 3."""
    from .harness import trainer

    def flip(step: int, model: torch.nn.Module) -> None:
        if joined.rank == 1 and step == 3:
            with torch.no_grad():
                next(model.parameters()).view(-1)[5] += 1e-6

    made = trainer(joined, root)
    for step, _ in enumerate(made.steps(), 1):
        flip(step, made.session.parallel.module)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("every", "noticed"), [(2, 4), (100, 6)])
def test_a_replica_that_differs_is_named_and_not_saved(ranks: Ranks, tmp_path: Path, every: int, noticed: int) -> None:
    run = Run.create(tmp_path / "run", train__replica_check_every=every, checkpoint__every_steps=3)
    with pytest.raises(Failed) as caught:
        ranks(3, disturbed, run.root)
    for name, message in caught.value.failures.values():
        assert name == "ReplicasDifferError"
        assert f"step {noticed}" in message and "rank 1 on node1 differs from 2 of 3 ranks" in message
    assert run.saved() == ["step-00000003"]


def agree(joined: World, sharded: bool) -> str:
    """Four ranks of which two pairs hold the same."""
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(joined.rank // 2)
    groups = [(0, 1), (2, 3)] if sharded else [(0, 1, 2, 3)]
    agreement = Agreement(joined, model, groups)
    agreement.begin(1)
    try:
        agreement.check()
    except ReplicasDifferError as error:
        return str(error)
    return "equal"


@pytest.mark.ranks(4)
def test_only_ranks_of_a_group_have_to_agree(ranks: Ranks) -> None:
    assert ranks(4, agree, True) == ["equal"] * 4
    for text in ranks(4, agree, False):
        assert "no majority" in text and "rank 3 on node3 has" in text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_the_hash_sees_one_bit_and_the_place(dtype: torch.dtype) -> None:
    first = [torch.arange(15).to(dtype), torch.ones(3, 5).to(dtype)]
    changed = [value.clone() for value in first]
    before = fingerprint(first)
    assert fingerprint(changed) == before
    changed[1].view(torch.uint8)[0, 0] ^= 1
    assert fingerprint(changed) != before
    assert fingerprint(first[::-1]) != before
    assert fingerprint([value[1:] for value in first]) != before
