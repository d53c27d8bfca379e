"""Saving, falling back, resuming; with real ranks."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from slurmddp.runtime.data.order import SampleOrder
from slurmddp.shared.checkpoint import layout
from slurmddp.shared.checkpoint.checkpoints import Checkpoints

from .harness import Failed, Ranks, Run
from .saving import load
from .test_layout import flip

# Dropout, and more parameters than DDP's first bucket: random states and the grouping of buckets matter.
LARGE: dict[str, Any] = {
    "train__model": {"width": 600, "dropout": 0.2},
    "train__steps": 6,
    "checkpoint__every_steps": 3,
    "batch__global": 7,
}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("size", [2, 3])
def test_a_resumed_run_has_the_same_bits(ranks: Ranks, tmp_path: Path, size: int) -> None:
    whole = Run.create(tmp_path / "whole", **LARGE)
    ranks.train(size, whole)
    parts = Run.create(tmp_path / "parts", **LARGE)
    shutil.copytree(whole.checkpoint(3), parts.checkpoint(3))
    ranks.train(size, parts, attempt=1)
    assert parts.events("resumed")[0]["random_states_restored"]
    assert parts.losses(1) == {step: loss for step, loss in whole.losses(0).items() if step > 3}
    assert same(load(whole.checkpoint(6)), load(parts.checkpoint(6)))
    assert whole.marker()["validation"] == parts.marker(1)["validation"]


@pytest.mark.ranks(2)
def test_a_checkpoint_holds_what_it_should(ranks: Ranks, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run")
    run.root.joinpath("checkpoints").mkdir()
    leftover = run.root / "checkpoints" / layout.temporary_name("saving", 2, 0, "ab")
    leftover.mkdir()
    ranks.train(2, run)
    assert run.saved() == ["step-00000004", "step-00000006"], "two are kept, and nothing else is there"
    manifest = Checkpoints.verify(run.checkpoint(6))
    there = {path.relative_to(run.checkpoint(6)).as_posix() for path in run.checkpoint(6).rglob("*") if path.is_file()}
    assert there == set(manifest.files) | {layout.MANIFEST, layout.COMPLETE}
    assert {"__0_0.distcp", "__1_0.distcp", ".metadata", "data.json", "rng/rank-00001.pt"} <= there
    assert (manifest.step, manifest.world, manifest.global_batch) == (6, 2, 5)
    saved = run.events("checkpoint_saved")
    assert [event["step"] for event in saved] == [2, 4, 6]
    assert all(event["bytes"] > 1000 and event["seconds"] > 0 for event in saved)
    assert run.marker()["state"] == "done" and run.marker()["step"] == 6


@pytest.mark.ranks(2)
@pytest.mark.parametrize("damage", ["flip", "truncate", "lose a shard", "no COMPLETE"])
def test_damage_falls_back_to_the_one_before(ranks: Ranks, tmp_path: Path, damage: str) -> None:
    run = Run.create(tmp_path / "run", checkpoint__keep=1, train__steps=4)
    ranks.train(2, run)
    whole = load(run.checkpoint(4))
    Run.create(run.root, checkpoint__keep=2, train__steps=8)
    ranks.train(2, run, attempt=1)  # 4, 6, 8; the last two are kept.
    shard = run.checkpoint(8) / "__1_0.distcp"
    file = {"no COMPLETE": "COMPLETE"}.get(damage, shard.name)
    if damage == "flip":
        flip(shard)
    elif damage == "truncate":
        shard.write_bytes(shard.read_bytes()[:-7])
    elif damage == "lose a shard":
        shard.unlink()
    else:
        (run.checkpoint(8) / "COMPLETE").unlink()
    Run.create(run.root, checkpoint__keep=1, train__steps=9)
    output = ranks.train(2, run, attempt=2)
    refused = run.events("checkpoint_rejected")
    assert [(event["path"], event["file"]) for event in refused] == [(str(run.checkpoint(8)), file)]
    assert f"checkpoint rejected: {run.checkpoint(8) / file}" in output
    assert run.events("resumed")[-1]["step"] == 6
    assert run.saved() == ["step-00000009"], "the damaged one goes with the old ones"
    assert whole.keys() == load(run.checkpoint(9)).keys()


def touch_in(step: int, path: Path) -> dict[str, Any]:
    """Data of which a sample of that step makes the file; the step is the first of its attempt."""
    return {"touch": SampleOrder(23, 3).ids(torch.tensor([5 * (step - 1)]))[0], "path": str(path)}


@pytest.mark.ranks(2)
def test_a_refused_checkpoint_does_not_push_good_ones_out(ranks: Ranks, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run")
    ranks.train(2, run)
    flip(run.checkpoint(6) / "__0_0.distcp")
    stop = tmp_path / "stop"
    Run.create(run.root, checkpoint__keep=1, train__data=touch_in(5, stop))
    ranks.train(2, run, 1, stop)
    assert run.marker(1)["step"] == 5
    assert run.saved() == ["step-00000005", "step-00000006"]
    stop.unlink()
    ranks.train(2, run, 2)
    assert run.saved() == ["step-00000006"]
    assert Checkpoints.verify(run.checkpoint(6))


@pytest.mark.ranks(2)
def test_stop_file_saves_and_a_later_attempt_finishes(ranks: Ranks, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    run = Run.create(tmp_path / "run", checkpoint__every_steps=None, train__data=touch_in(1, stop))
    ranks.train(2, run, 0, stop)
    assert run.saved() == ["step-00000001"]
    marker = run.marker()
    assert (marker["state"], marker["step"], marker["steps"]) == ("stopped", 1, 6)
    assert marker["reason"] == "stop file"
    assert run.events("stopping")[0]["step"] == 1
    ranks.train(2, run, 0)  # torchrun starting the ranks again: nothing happens.
    assert run.saved() == ["step-00000001"]
    stop.unlink()
    ranks.train(2, run, 1, stop)
    assert run.marker(1)["state"] == "done"
    whole = Run.create(tmp_path / "whole")
    ranks.train(2, whole)
    assert run.losses(0) | run.losses(1) == whole.losses(0)


@pytest.mark.ranks(2)
def test_a_finished_run_only_evaluates(ranks: Ranks, tmp_path: Path) -> None:
    first = Run.create(tmp_path / "first")
    ranks.train(2, first)
    second = Run.create(tmp_path / "second", resume_from=[str(tmp_path / "none"), str(first.root / "checkpoints")])
    before = {path: path.stat().st_mtime_ns for path in first.root.rglob("*")}
    output = ranks.train(1, second)
    assert "nothing to train: 6 steps are done" in output
    assert second.marker()["state"] == "done"
    assert second.marker()["validation"] == pytest.approx(first.marker()["validation"], rel=1e-6)
    assert {path: path.stat().st_mtime_ns for path in first.root.rglob("*")} == before, "resume_from is only read"


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train__model": {"width": 9}},
            r"it is of another model: 0.weight: [8, 4] in the checkpoint, [9, 4] now",
        ),
        ({"train__data": {"salt": 1}}, "the dataset has changed (its fingerprint differs)"),
        ({"train__data": {"train": 24}}, "the dataset has changed: it had 23 samples and now has 24"),
        ({"train__seed": 4}, "train.seed was 3 and is now 4"),
        ({"train__optimizer__name": "sgd"}, "train.optimizer.name was adamw and is now sgd"),
    ],
)
def test_what_does_not_fit_is_refused(
    ranks: Ranks, tmp_path: Path, finished: Run, changes: dict[str, Any], message: str
) -> None:
    run = Run.create(tmp_path / "run", train__steps=8, resume_from=[str(finished.root / "checkpoints")], **changes)
    with pytest.raises(Failed) as caught:
        ranks.train(2, run)
    for name, text in caught.value.failures.values():
        assert name == "UserError"
        assert message in text and "start a new run without --resume" in text


@pytest.fixture(scope="module")
def finished(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run.create(tmp_path_factory.mktemp("finished"))
    ranks.train(2, run)
    return run


@pytest.mark.ranks(2)
def test_another_global_batch_goes_on_where_the_samples_were(ranks: Ranks, tmp_path: Path, finished: Run) -> None:
    run = Run.create(
        tmp_path / "run", train__steps=8, batch__global=4, resume_from=[str(finished.root / "checkpoints")]
    )
    ranks.train(2, run)
    order = SampleOrder(23, 3)
    assert run.stream(0) == {7: order.ids(torch.arange(30, 34)), 8: order.ids(torch.arange(34, 38))}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({"train__precision": "fp16"}, "scaler.growth_tracker"),
        ({"train__optimizer__name": "sgd"}, "optimizer.0.weight.momentum_buffer"),
    ],
)
def test_all_state_is_kept(ranks: Ranks, tmp_path: Path, change: dict[str, Any], kept: str) -> None:
    whole = Run.create(tmp_path / "whole", **change)
    ranks.train(2, whole)
    parts = Run.create(tmp_path / "parts", **change)
    shutil.copytree(whole.checkpoint(4), parts.checkpoint(4))
    ranks.train(2, parts, attempt=1)
    tensors = load(parts.checkpoint(6))
    assert tensors[kept].abs().sum() > 0
    assert same(tensors, load(whole.checkpoint(6)))


@pytest.mark.ranks(2)
def test_the_clock_can_ask_for_checkpoints(ranks: Ranks, tmp_path: Path) -> None:
    run = Run.create(
        tmp_path / "run",
        checkpoint__every_steps=None,
        checkpoint__every_seconds=0.0,
        checkpoint__asynchronous=False,
        train__steps=3,
    )
    ranks.train(2, run)
    assert [event["step"] for event in run.events("checkpoint_saved")] == [1, 2, 3]


@pytest.mark.ranks(2)
def test_after_a_save_that_fails_training_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", train__steps=2)
    ranks.train(2, run)
    (run.checkpoint(4)).write_text("a file in the way")
    Run.create(run.root, train__steps=6)
    ranks.train(2, run, attempt=1)
    (failed,) = run.events("checkpoint_failed")
    assert failed["step"] == 4 and failed["older"]
    assert failed["why"].startswith("rank 0 on node0: [Errno 20] is not a folder")
    assert Checkpoints.verify(run.checkpoint(2)) and Checkpoints.verify(run.checkpoint(6))


@pytest.mark.ranks(2)
def test_a_save_that_failed_is_made_up_for_at_the_end_by_its_own_step(ranks: Ranks, tmp_path: Path) -> None:
    """The weights of step 5 must not be stored as those of step 4, which could not be written."""
    whole = Run.create(tmp_path / "whole", train__steps=5)
    ranks.train(2, whole)
    run = Run.create(tmp_path / "run", train__steps=5, checkpoint__at_end=False)
    (run.root / "checkpoints").mkdir()
    run.checkpoint(4).write_text("a file in the way")
    ranks.train(2, run)
    assert [event["step"] for event in run.events("checkpoint_failed")] == [4]
    assert [event["step"] for event in run.events("checkpoint_saved")] == [2, 5]
    assert run.checkpoint(4).read_text() == "a file in the way"
    assert Checkpoints.verify(run.checkpoint(5)).step == 5
    assert same(load(run.checkpoint(5)), load(whole.checkpoint(5)))
    assert run.marker()["state"] == "done"


@pytest.mark.ranks(2)
def test_journals_on_a_full_disk_do_not_end_a_run(ranks: Ranks, tmp_path: Path) -> None:
    """After a save that failed, too: its event cannot be written either."""
    run = Run.create(tmp_path / "run", train__steps=5)
    (run.root / "checkpoints").mkdir()
    run.checkpoint(4).write_text("a file in the way")
    for name in ("events.jsonl", "metrics.jsonl"):
        (run.root / name).symlink_to("/dev/full")
    said = ranks.train(2, run)
    assert "warning: checkpoint of step 4 could not be written" in said
    for name in ("events.jsonl", "metrics.jsonl"):
        assert said.count(f"warning: {name} cannot be written (No space left on device): training continues") == 1
    assert run.marker()["state"] == "done" and Checkpoints.verify(run.checkpoint(5))
