"""Tensor parallelism of the task lm, on any mesh, against one process."""

import json
import math
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from slurmddp.runtime import job
from slurmddp.runtime.parallel.tensor import split
from slurmddp.runtime.parallel.wrap import wrap
from slurmddp.runtime.tasks.gpt import GPT
from slurmddp.runtime.world import World
from slurmddp.shared.checkpoint import export
from slurmddp.shared.checkpoint.checkpoints import read_contents

from .harness import Failed, Ranks, Run, make_job
from .launched import launched
from .saving import load, same

STEPS = 20
MODEL: dict[str, Any] = {"layers": 2, "heads": 4, "width": 16}


@pytest.fixture(autouse=True)
def _new_processes(ranks: Ranks) -> Iterator[None]:
    """DTensor remembers a mesh by its ranks, with groups that a test before has left."""
    ranks.close()
    yield
    ranks.close()


def lm(root: Path, name: str, data: dict[str, Any], **changes: Any) -> Run:
    """A run of 20 steps on 9 samples a step, which no number of ranks divides."""
    usual: dict[str, Any] = {
        "train__task": "lm", "train__data": data, "train__model": MODEL, "train__steps": STEPS,
        "train__optimizer__lr": 1e-3, "train__optimizer__clip": 0.5, "batch__global": 9, "batch__micro": 2,
        "checkpoint__every_steps": None, "train__schedule__steps": STEPS,
    }  # fmt: skip
    return Run.create(root / name, **(usual | changes))


def windows(root: Path) -> dict[str, Any]:
    text = root / "text"
    text.write_bytes(random.Random(0).randbytes(9 * 400))
    return {"path": str(text), "context": 8, "validation_fraction": 0.1}


def documents(root: Path) -> dict[str, Any]:
    """Of 1 to 40 bytes: most lengths are no multiple of a tensor group."""
    dice, path = random.Random(0), root / "documents.jsonl"
    lines = (json.dumps({"text": "".join(dice.choices("abcdefgh", k=dice.randint(1, 40)))}) for _ in range(300))
    path.write_text("\n".join(lines) + "\n")
    return {"path": str(path), "context": 16, "format": "jsonl", "validation_fraction": 0.1}


def mesh(replicate: int, shard: int, tensor: int) -> dict[str, Any]:
    return {"parallel__replicate": replicate, "parallel__shard": shard, "parallel__tensor": tensor}


FACTS = {"loss", "grad_norm", "bits_per_byte", "samples", "epoch"}


def same_curve(run: Run, wanted: Run, *, padding: bool = True, rel: float = 1e-5) -> None:
    """Loss, norm and counts of each step, and of the validation; `padding`: the micro batches are the same, too."""
    facts = FACTS | {"padding"} if padding else FACTS
    found, reference = run.lines("metrics.jsonl"), wanted.lines("metrics.jsonl")
    assert len(found) == len(reference) == STEPS
    for ours, theirs in zip(found, reference, strict=True):
        known = {key: value for key, value in theirs.items() if key in facts}
        assert {key: ours[key] for key in known} == pytest.approx(known, rel=rel), ours["step"]
    flops = [each.events("ready")[0]["flops_per_target"] for each in (run, wanted)]
    if "padding" not in reference[-1]:  # Which the group has more of.
        assert flops[0] == flops[1]
    ours, theirs = run.marker()["validation"], wanted.marker()["validation"]
    assert ours == pytest.approx(theirs, rel=rel) and ours["count"] == theirs["count"]


def same_samples(run: Run, wanted: Run, tensor: int) -> None:
    """The ranks of a tensor group take the same ones; the groups together, each of the step's samples once."""
    traces = [path.read_text() for path in sorted((run.root / "trace" / "attempt-000").iterdir())]
    for first in range(0, len(traces), tensor):
        assert set(traces[first : first + tensor]) == {traces[first]}
    for step, ids in wanted.stream(0).items():
        rows = [json.loads(trace.splitlines()[step - 1]) for trace in traces[::tensor]]
        assert sorted(number for row in rows for number in row["ids"]) == sorted(ids)


@pytest.mark.ranks(8)
def test_two_by_two_by_two_is_one_process(ranks: Ranks, tmp_path: Path) -> None:
    data = windows(tmp_path)
    one, eight = lm(tmp_path, "one", data), lm(tmp_path, "eight", data, **mesh(2, 2, 2))
    ranks.train(1, one)
    output = ranks.train(8, eight)
    assert "parallel   HSDP+TP, replicate 2 x shard 2 x tensor 2" in output
    assert "accumulation 2 x tensor groups 4" in output
    assert eight.events("started")[0]["parallel"] == "HSDP+TP"
    same_curve(eight, one)
    same_samples(eight, one, 2)


@pytest.mark.ranks(2)
@pytest.mark.long
def test_documents_of_any_length_sorted_and_recomputed(ranks: Ranks, tmp_path: Path) -> None:
    """Odd lengths are padded for the group, which no count of tokens sees."""
    options = {
        "train__model": MODEL | {"tied": False}, "batch__by_length": 3, "train__activation_checkpointing": True,
    }  # fmt: skip
    data = documents(tmp_path)
    one, two = lm(tmp_path, "one", data, **options), lm(tmp_path, "two", data, **options, **mesh(1, 1, 2))
    ranks.train(1, one)
    assert "parallel   TP, replicate 1 x shard 1 x tensor 2" in ranks.train(2, two)
    assert "padding" in two.lines("metrics.jsonl")[-1]
    same_curve(two, one)
    same_samples(two, one, 2)


@pytest.mark.long
@pytest.mark.ranks(8)
@pytest.mark.parametrize(
    "sizes",
    [(1, 1, 2), (1, 1, 4), (1, 2, 2), (2, 1, 2), (1, 3, 2), (3, 1, 2), (1, 2, 4), (2, 1, 4), (1, 4, 2), (4, 1, 2)],
    ids=str,
)
@pytest.mark.parametrize("kind", ["windows", "documents"])
def test_every_mesh_is_one_process(ranks: Ranks, tmp_path: Path, sizes: tuple[int, int, int], kind: str) -> None:
    """Three shards do not divide what a tensor group has of a matrix."""
    options: dict[str, Any] = (
        {"batch__by_length": 3} if kind == "documents" else {"train__model": MODEL | {"tied": False}}
    )
    data = documents(tmp_path) if kind == "documents" else windows(tmp_path)
    one, many = lm(tmp_path, "one", data, **options), lm(tmp_path, "many", data, **options, **mesh(*sizes))
    ranks.train(1, one)
    ranks.train(math.prod(sizes), many)
    same_curve(many, one, padding=sizes[:2] == (1, 1))
    same_samples(many, one, sizes[2])


@pytest.mark.long
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "option", [{"train__precision": "fp16"}, {"train__optimizer__name": "sgd"}, {"train__optimizer__fused": False}],
    ids=lambda option: next(iter(option)),
)  # fmt: skip
def test_options(ranks: Ranks, tmp_path: Path, option: dict[str, Any]) -> None:
    data = windows(tmp_path)
    one, two = lm(tmp_path, "one", data, **option), lm(tmp_path, "two", data, **option, **mesh(1, 1, 2))
    ranks.train(1, one)
    ranks.train(2, two)
    same_curve(two, one, rel=1e-2 if "train__precision" in option else 1e-5)


MESHES = [(4, 1, 1), (2, 2, 1), (1, 4, 1), (2, 1, 2), (1, 2, 2), (1, 1, 4)]
HALF = {"checkpoint__every_steps": STEPS // 2, "checkpoint__keep": 3}


def goes_on(ranks: Ranks, saved: Run, run: Run, size: int) -> None:
    """The run, started from another one's save at half of the steps, ends as that one did."""
    shutil.copytree(saved.root / "checkpoints", run.root / "checkpoints")
    shutil.rmtree(run.checkpoint(STEPS))
    ranks.train(size, run, attempt=1)
    assert run.events("resumed")[0]["step"] == STEPS // 2
    wanted = {step: loss for step, loss in saved.losses(0).items() if step > STEPS // 2}
    assert run.losses(1) == pytest.approx(wanted, rel=1e-5)
    ours, theirs = (load(each.checkpoint(STEPS)) for each in (run, saved))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert (ours[name] - value).norm() <= 1e-4 * value.norm(), name


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ((1, 2, 2), (2, 1, 1)),
        pytest.param((2, 1, 2), (1, 1, 2), marks=pytest.mark.long),  # as after a lost node
        *(pytest.param(one, other, marks=pytest.mark.long) for one in MESHES for other in MESHES
          if one != other and max(one[2], other[2]) > 1),
    ],
    ids=str,
)  # fmt: skip
def test_saved_in_one_mesh_and_loaded_in_another(
    ranks: Ranks, tmp_path: Path, source: tuple[int, ...], target: tuple[int, ...]
) -> None:
    data = windows(tmp_path)
    saved = lm(tmp_path, "saved", data, **HALF, **mesh(*source))
    ranks.train(math.prod(source), saved)
    goes_on(ranks, saved, lm(tmp_path, "there", data, **HALF, **mesh(*target)), math.prod(target))
    # An export reads blocks of rows and columns.
    folder, exported = saved.checkpoint(STEPS), tmp_path / "model.pt"
    export.write(folder, read_contents(folder), exported, form="pt")
    weights, tensors = torch.load(exported, weights_only=True), load(folder)
    assert all(torch.equal(value, tensors[f"model.{name}"]) for name, value in weights.items())
    assert len(weights) == len(list(GPT(**MODEL, context=8, dropout=0.0, tied=True).parameters()))


@pytest.mark.long
@pytest.mark.ranks(4)
def test_a_killed_rank_starts_again(ranks: Ranks, tmp_path: Path) -> None:
    """And the run is that of ranks which nobody disturbed, to the bit: each draws its own dropout masks again."""
    options = {
        "train__steps": 60, "checkpoint__every_steps": 5, "train__model": MODEL | {"dropout": 0.1}, **mesh(2, 1, 2)
    }  # fmt: skip
    data = windows(tmp_path)
    whole, broken = lm(tmp_path, "whole", data, **options), lm(tmp_path, "broken", data, **options)
    with launched(broken, 4, "--max-restarts=1") as job:
        job.until_step(12)
        job.send(3, signal.SIGKILL)
        assert job.wait() == 0, job.stderr
    ranks.train(4, whole)
    assert broken.events("resumed")[0]["step"] >= 5
    assert broken.losses(0) == whole.losses(0)
    assert same(load(broken.checkpoint(60)), load(whole.checkpoint(60)))


def dropped(joined: World) -> tuple[list[list[bool]], list[list[bool]], float, float]:
    """What dropout kept, twice; the squared norm of the gradient; and how the loss changes along it."""
    kept: list[list[bool]] = []
    drop = functional.dropout

    def noted(x: torch.Tensor, p: float, training: bool) -> torch.Tensor:
        found = drop(x, p, training)
        kept.append((found != 0).flatten().tolist())
        return found

    torch.manual_seed(0)
    model = GPT(**MODEL, context=8, dropout=0.3, tied=True).double()
    split(model, init_device_mesh("cpu", (joined.size,)))
    tokens, targets = torch.randint(256, (2, 3, 8))
    torch.manual_seed(1 + joined.rank)  # as training does
    state = torch.get_rng_state()

    def loss() -> torch.Tensor:
        torch.set_rng_state(state)
        return functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "dropout", noted)
        loss().backward()
        first = kept.copy()
        kept.clear()
        loss()
    gradients = [(item, item.grad) for item in model.parameters() if item.grad is not None]
    square = sum(float(whole(gradient).square().sum()) for _, gradient in gradients)
    moved = []
    with torch.no_grad():
        for factor in (1e-4, -2e-4):
            for item, gradient in gradients:
                item.add_(gradient, alpha=factor)
            moved.append(float(loss()))
    return first, kept, square, (moved[0] - moved[1]) / 2e-4


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@pytest.mark.ranks(2)
def test_ranks_drop_their_own_parts_and_gradients_are_those_of_the_masks(ranks: Ranks) -> None:
    """Nothing that ranks hold in common is dropped: parts of the sequence between layers, and heads within."""
    (kept, again, square, slope), (others, *_, others_slope) = ranks(2, dropped)
    assert kept == again and len(kept) == len(others) == 1 + 2 * MODEL["layers"]
    for mine, theirs in zip(kept, others, strict=True):
        assert len(mine) == len(theirs) == 3 * 4 * MODEL["width"] and mine != theirs
    assert slope == others_slope == pytest.approx(square, rel=1e-5)


def test_logits_without_padding_are_no_view() -> None:
    """FSDP warns of a module that returns one, at each start."""
    assert not GPT(**MODEL, context=8, dropout=0.0, tied=True)(torch.zeros(1, 8, dtype=torch.int64))._is_view()


def apart(joined: World) -> None:
    """Each rank of this pool has a node of its own."""
    wrap(GPT(**MODEL, context=8, dropout=0.0, tied=True), job.parse(make_job(parallel__tensor=2)), joined)


@pytest.mark.ranks(2)
def test_no_tensor_group_spans_nodes(ranks: Ranks) -> None:
    with pytest.raises(Failed) as caught:
        ranks(2, apart)
    assert {name for name, _ in caught.value.failures.values()} == {"UserError"}
    assert all("puts ranks 0 to 1 on several nodes" in said for _, said in caught.value.failures.values())
