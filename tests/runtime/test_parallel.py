"""DDP, FSDP2 and HSDP against one process; the options of each; checkpoints from any of them into any other."""

import contextlib
import io
import math
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from slurmddp.runtime import job, optimizer
from slurmddp.runtime.checkpoint import shards, state
from slurmddp.runtime.checkpoint.staging import Staging
from slurmddp.runtime.errors import UserError
from slurmddp.runtime.parallel.model import norms
from slurmddp.runtime.parallel.wrap import wrap
from slurmddp.runtime.tasks.gpt import GPT
from slurmddp.runtime.world import World
from slurmddp.shared import batch, mesh

from .harness import Failed, Ranks, Run, make_job, trainer
from .saving import load

STEPS, MICRO, CONTEXT, CLIP = 10, 2, 8, 0.2
TOTALS = (7, 2)  # In turn: of the 2 samples, a third rank gets none.


class Shared(nn.Module):
    """Two blocks with one matrix between them, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
        self.blocks[1][0].weight = self.blocks[0][0].weight
        self.register_buffer("offset", torch.ones(16))
        self.head = nn.Linear(16, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.offset
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


class Pictures(nn.Module):
    """Eight tokens as a picture of 2 channels, 2 x 2: convolutions, for channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(32, 8 * 256)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(pictures).relu()).relu()
        logits: torch.Tensor = self.head(x.flatten(1)).view(-1, 8, 256)
        return logits


def build(kind: str, seed: int = 0, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(seed)
    if kind == "gpt":
        return GPT(context=CONTEXT, layers=2, heads=2, width=16, dropout=dropout, tied=True)
    return Shared() if kind == "shared" else Pictures()


def tokens(step: int) -> torch.Tensor:
    """int64 [7, context + 1]; the batch of a step is its beginning."""
    return torch.randint(0, 256, (7, CONTEXT + 1), generator=torch.Generator().manual_seed(step))


def loss_of(model: Any, kind: str, rows: torch.Tensor) -> torch.Tensor:
    inputs = rows[:, :-1]
    if kind == "pictures":
        inputs = inputs.view(-1, 2, 2, 2) / 128.0 - 1.0
    return F.cross_entropy(model(inputs).flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")


def reference(kind: str) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step in one process, the whole batch at once, with torch's own clipping."""
    model = build(kind)
    wanted = job.parse(make_job(train__optimizer__fused=False)).train.optimizer
    optim = optimizer.build(model, wanted)
    found = []
    for step in range(STEPS):
        rows = tokens(step)[: TOTALS[step % 2]]
        loss = loss_of(model, kind, rows) / rows[:, 1:].numel()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optim.step()
        optim.zero_grad()
        found.append((loss.item(), norm.item()))
    return found


class Training:
    """A loop of a few lines around what `wrap` gives."""

    def __init__(self, joined: World, kind: str, *, seed: int = 0, dropout: float = 0.0, **changes: Any) -> None:
        self.world, self.kind = joined, kind
        wanted = job.parse(make_job(**changes))
        bare = build(kind, seed, dropout)
        torch.manual_seed(joined.rank)
        self.parallel = wrap(bare, wanted, joined)
        optim = optimizer.build(self.parallel.module, wanted.train.optimizer)
        scaler = torch.amp.GradScaler("cpu", enabled=wanted.train.precision == "fp16", init_scale=256.0)
        self.trained = state.Trained(self.parallel.module, optim, scaler)
        with self.parallel.exchanging(True):
            self.parallel.backward(loss_of(self.parallel.model, kind, tokens(0)[:1]) * 0.0)
        optim.zero_grad()

    def step(self, step: int) -> tuple[float, float]:
        total = TOTALS[step % 2]
        rows, count = tokens(step), total * CONTEXT
        parts = batch.micro_batches(total, MICRO, self.world.size, self.world.rank)
        sum_of_losses = 0.0
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            if not (part or last or self.parallel.lockstep):
                continue
            with self.parallel.exchanging(last):
                loss = loss_of(self.parallel.model, self.kind, rows[list(part or [0])]) * (1.0 if part else 0.0)
                # Twice too large, as where the number of targets was guessed wrong: put right at the end.
                self.parallel.backward(self.trained.scaler.scale(loss * (2.0 * self.parallel.divides_by / count)))
            sum_of_losses += loss.item()
        self.trained.scaler.unscale_(self.trained.optimizer)
        norm = 0.5 * float(self.parallel.gradients_norm())
        self.parallel.scale_gradients(0.5 * min(1.0, CLIP / (norm + 1e-6)))
        self.trained.scaler.step(self.trained.optimizer)
        self.trained.scaler.update()
        self.trained.optimizer.zero_grad()
        return sum(self.world.gather(sum_of_losses)) / count, norm

    def evaluate(self) -> float:
        with torch.no_grad():
            loss = loss_of(self.parallel.model, self.kind, tokens(99)).item()
        self.parallel.rest()
        return loss


def curve(joined: World, kind: str, options: dict[str, Any]) -> list[tuple[float, float]]:
    training = Training(joined, kind, **options)
    return [training.step(step) for step in range(STEPS)]


def agree(found: list[tuple[float, float]], wanted: list[tuple[float, float]], rel: float = 1e-5) -> None:
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in wanted], rel=rel)
    # Norms are sums of squares of differences between large numbers: they carry more rounding than a loss.
    assert [norm for _, norm in found] == pytest.approx([norm for _, norm in wanted], rel=10 * rel)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("kind", "world", "shard"),
    [
        *(("gpt", 3, 1), ("gpt", 3, 3), ("shared", 2, 2)),
        *(pytest.param("gpt", *sizes, marks=pytest.mark.long) for sizes in ((1, 1), (2, 1), (2, 2))),
        *(pytest.param("shared", *sizes, marks=pytest.mark.long) for sizes in ((1, 1), (2, 1), (3, 1), (3, 3))),
    ],
)
def test_the_curve_is_that_of_one_process(ranks: Ranks, kind: str, world: int, shard: int) -> None:
    wanted = reference(kind)
    assert min(norm for _, norm in wanted) > CLIP  # Every step clips.
    found = ranks(world, curve, kind, {"parallel__shard": shard})
    assert all(one == found[0] for one in found)
    agree(found[0], wanted)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("replicate", "shard"), [(2, 2), *(pytest.param(None, shard, marks=pytest.mark.long) for shard in (2, 4))]
)
def test_the_curve_with_replicas_of_shards(ranks: Ranks, replicate: int | None, shard: int) -> None:
    found = ranks(4, curve, "gpt", {"parallel__shard": shard, "parallel__replicate": replicate})
    assert all(one == found[0] for one in found)
    agree(found[0], reference("gpt"))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shard", [1, 2])
@pytest.mark.parametrize(
    ("option", "near"),
    [
        ({"train__activation_checkpointing": True}, 1e-5),
        ({"train__optimizer__fused": False}, 1e-5),
        ({"train__ddp__static_graph": True}, 1e-5),
        ({"train__ddp__bucket_mb": 0.005}, 1e-5),
        (
            {"train__ddp__compression": "bf16"},
            2e-2,
        ),  # The rounding grows where the norm does: step 7 has four times it.
        ({"train__precision": "fp16"}, 1e-5),  # The gradient scaler alone: nothing here is autocast.
    ],
    ids=lambda value: next(iter(value)).rsplit("__", 1)[1] if isinstance(value, dict) else "",
)
def test_options_leave_the_curve_as_it_is(ranks: Ranks, shard: int, option: dict[str, Any], near: float) -> None:
    agree(ranks(2, curve, "gpt", {"parallel__shard": shard, **option})[0], reference("gpt"), near)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shard", [1, 2])
def test_channels_last(ranks: Ranks, shard: int) -> None:
    assert all(ranks(2, strides, shard))
    options = {"parallel__shard": shard, "train__channels_last": True}
    agree(ranks(2, curve, "pictures", options)[0], reference("pictures"))


def strides(joined: World, shard: int) -> bool:
    """Whether the first layer gives its output with the channels last in memory."""
    training = Training(joined, "pictures", parallel__shard=shard, train__channels_last=True)
    seen: list[torch.Tensor] = []
    training.parallel.module.first.register_forward_hook(lambda module, args, output: seen.append(output))
    training.step(0)
    return all(output.is_contiguous(memory_format=torch.channels_last) for output in seen)


def sgd_with_momentum(joined: World, shard: int, fused: bool) -> list[tuple[float, float]]:
    options = {"parallel__shard": shard, "train__optimizer__name": "sgd", "train__optimizer__fused": fused}
    return curve(joined, "gpt", options)


@pytest.mark.ranks(2)
def test_fused_sgd_is_sgd(ranks: Ranks) -> None:
    wanted = ranks(1, sgd_with_momentum, 1, False)[0]
    for shard in (1, 2):
        agree(ranks(2, sgd_with_momentum, shard, True)[0], wanted)


def with_dropout(joined: World, shard: int, checkpointing: bool) -> list[tuple[float, float]]:
    options = {"parallel__shard": shard, "train__activation_checkpointing": checkpointing}
    training = Training(joined, "gpt", dropout=0.3, **options)
    return [training.step(step) for step in range(3)]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shard", [1, 2])
def test_activation_checkpointing_repeats_the_random_numbers(ranks: Ranks, shard: int) -> None:
    assert ranks(2, with_dropout, shard, True)[0] == ranks(2, with_dropout, shard, False)[0]


def recomputations(joined: World) -> tuple[int, int, list[str]]:
    training = Training(joined, "gpt", train__activation_checkpointing=True)
    block, calls = training.parallel.module.blocks[0].norm_mlp, []
    block.register_forward_hook(lambda module, args, output: calls.append(1))
    training.evaluate()
    evaluated = len(calls)
    training.step(1)  # 2 samples, so one micro batch: forward, and again in the backward pass.
    return evaluated, len(calls) - evaluated, list(training.parallel.module.state_dict())


@pytest.mark.ranks(2)
def test_activation_checkpointing_recomputes_and_keeps_names(ranks: Ranks) -> None:
    assert ranks(2, recomputations)[0] == (1, 2, list(build("gpt").state_dict()))


def compiled(joined: World, options: dict[str, Any]) -> tuple[list[tuple[float, float]], list[str], int]:
    """Captured, and differentiated ahead of time, but run by torch: what a C++ compiler makes of it is not ours."""
    import torch._dynamo.utils

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        training = Training(joined, "gpt", train__compile=True, **options)
    found = [training.step(step) for step in range(3)]
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return found, list(training.parallel.module.state_dict()), graphs


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "options",
    [
        *(pytest.param(options, marks=pytest.mark.long) for options in ({}, {"parallel__shard": 2})),
        {"parallel__shard": 2, "train__activation_checkpointing": True},
    ],
)
def test_compile(ranks: Ranks, options: dict[str, Any]) -> None:
    found, names, graphs = ranks(2, compiled, options)[0]
    agree(found, reference("gpt")[:3])
    assert names == list(build("gpt").state_dict())
    assert graphs > 1  # The probe's, and the model's.


def graphs_before_the_first_step(joined: World, root: Path) -> int:
    import torch._dynamo.utils

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        made = trainer(joined, root)
    run, seen = made.session.stepper.run, []

    def first_looking(*arguments: Any, **options: Any) -> Any:
        seen.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        return run(*arguments, **options)

    with mock.patch.object(made.session.stepper, "run", first_looking), contextlib.redirect_stdout(io.StringIO()):
        assert len(list(made.steps())) == len(seen)
    return int(seen[0])


@pytest.mark.ranks(1)
def test_the_model_is_compiled_before_the_first_step(ranks: Ranks, tmp_path: Path) -> None:
    """Where nobody waits for a step, or takes one that long for a hang."""
    run = Run.create(tmp_path / "run", train__compile=True, train__steps=2)
    assert ranks(1, graphs_before_the_first_step, run.root)[0] > 1  # The probe's, and the model's.


def without_compiler(joined: World) -> None:
    import torch._inductor.config as config

    with (
        mock.patch.object(config.cpp, "cxx", ("/nowhere/g++",)),
        mock.patch.object(config, "force_disable_caches", True),
    ):
        torch._dynamo.reset()
        Training(joined, "gpt", train__compile=True)


def without_fsdp2(joined: World) -> None:
    gone = {"torch.distributed.fsdp": None, "torch.distributed._composable.fsdp": None}
    with mock.patch.dict(sys.modules, gone):
        Training(joined, "gpt", parallel__shard=2)


def with_a_scalar(joined: World) -> None:
    model = nn.Linear(2, 2)
    model.scale = nn.Parameter(torch.tensor(1.0))
    wrap(model, job.parse(make_job(parallel__shard=2)), joined)


def without_blocks(joined: World) -> None:
    Training(joined, "pictures", train__activation_checkpointing=True)


def with_a_wrong_mesh(joined: World) -> None:
    Training(joined, "gpt", parallel__shard=3)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (without_compiler, "train.compile: torch.compile does not work here"),
        (without_fsdp2, "needs FSDP2 (torch 2.6 or newer)"),
        (with_a_scalar, "scalar parameters cannot be sharded: scale"),
        (without_blocks, "the model has no blocks to recompute"),
        (with_a_wrong_mesh, "2 ranks cannot be divided into groups of 3"),
    ],
)
def test_what_the_user_can_put_right(ranks: Ranks, wrong: Any, said: str) -> None:
    with pytest.raises(Failed) as caught:
        ranks(2, wrong)
    assert {name for name, _ in caught.value.failures.values()} == {"UserError"}
    assert all(said in message for _, message in caught.value.failures.values())


def test_the_norm_of_a_long_tensor_is_exact() -> None:
    """In one sum, torch is wrong by 1e-4 here."""
    long = torch.randn(4, 1 << 20, generator=torch.Generator().manual_seed(0))
    short = torch.ones(3, 2).t()
    true = math.hypot(float(long.double().norm()), float(short.double().norm()))
    assert float(norms([long, short]).norm()) == pytest.approx(true, rel=1e-6)


def from_different_seeds(joined: World) -> bool:
    training = Training(joined, "shared", seed=joined.rank, parallel__shard=2)
    wanted = build("shared", 0).state_dict()
    return all(torch.equal(whole(value), wanted[name]) for name, value in training.parallel.module.state_dict().items())


@pytest.mark.ranks(2)
def test_shards_are_of_rank_0s_weights(ranks: Ranks) -> None:
    assert all(ranks(2, from_different_seeds))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    full: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"parallel__shard": 4},
    "hsdp": {"parallel__shard": 2},
}


def save(joined: World, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    plan = shards.plan(tensors, joined)
    staging = Staging(plan.own, tensors, joined.device)
    staging.fill(tensors)
    results = joined.gather(shards.write(folder, joined.rank, staging.parts)[0])
    if joined.is_main:
        shards.finish(folder, plan.metadata, results)
    joined.gather(None)


def save_all(joined: World, root: Path) -> dict[str, tuple[float, float, float]]:
    """Train two steps in each layout, save, and train a third: its loss and norm, and a loss on other data."""
    found = {}
    for name, options in LAYOUTS.items():
        training = Training(joined, "gpt", **options)
        for step in range(2):
            training.step(step)
        validation = training.evaluate()
        joined.on_main((root / name).mkdir)
        save(joined, root / name, state.collect(training.trained))
        found[name] = (*training.step(2), validation)
    return found


def load_all(joined: World, root: Path, layouts: dict[str, dict[str, Any]]) -> dict[tuple[str, str], Any]:
    """Load each checkpoint into each layout: the tensors that are not as saved, and what `save_all` gives."""
    found: dict[tuple[str, str], Any] = {}
    for source in LAYOUTS:
        saved = load(root / source)
        for name, options in layouts.items():
            training = Training(joined, "gpt", seed=1, **options)
            metadata = shards.read_metadata(root / source)
            stored = metadata.state_dict_metadata
            state.check(training.trained, stored)
            tensors = state.prepare(training.trained, stored)
            shards.read(root / source, metadata, tensors)
            state.adopt(training.trained, tensors)
            now = {key: whole(tensor) for key, tensor in state.collect(training.trained).items()}
            wrong = [key for key in now | saved if key not in now or not torch.equal(now[key], saved[key])]
            validation = training.evaluate()
            found[source, name] = wrong, (*training.step(2), validation)
    return found


@pytest.mark.ranks(4)
def test_checkpoints_go_from_any_layout_into_any_other(ranks: Ranks, tmp_path: Path) -> None:
    saved = ranks(4, save_all, tmp_path)[0]
    names = set(load(tmp_path / "ddp"))
    assert {"model.tokens.weight", "optimizer.tokens.weight.exp_avg_sq", "optimizer.tokens.weight.step"} <= names
    fewer = {"fsdp of 3": {"parallel__shard": 3, "train__optimizer__fused": False}}
    for size, layouts in ((4, LAYOUTS), (3, fewer)):
        for results in ranks(size, load_all, tmp_path, layouts):
            assert len(results) == len(LAYOUTS) * len(layouts)
            for (source, target), (wrong, third) in results.items():
                assert not wrong, f"{source} to {target}"
                assert third == pytest.approx(saved[source], rel=1e-4), f"{source} to {target}"


def test_the_mesh_is_row_major() -> None:
    assert mesh.sizes(8, None, 4) == {"replicate": 2, "shard": 4}
    assert mesh.groups({"replicate": 2, "shard": 3}) == {
        "replicate": ((0, 3), (1, 4), (2, 5)),
        "shard": ((0, 1, 2), (3, 4, 5)),
    }
    three = mesh.groups({"replicate": 2, "shard": 2, "tensor": 2})
    assert three["tensor"] == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert three["shard"] == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert three["replicate"] == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert [mesh.kind(mesh.sizes(4, None, shard)) for shard in (1, 2, 4)] == ["DDP", "HSDP", "FSDP"]


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((6, None, 4), "cannot be divided into groups of 4"),
        ((6, 2, 2), "is 4, but the job has 6"),
        ((4, 4, 0), "at least 1"),
    ],
)
def test_a_mesh_that_does_not_fit(sizes: tuple[int, int | None, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        mesh.sizes(*sizes)


def grid_groups(joined: World) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """As we say, and as torch's mesh has them."""
    from slurmddp.runtime.parallel.sharding import device_mesh

    sizes = mesh.sizes(joined.size, None, 2)
    grid = device_mesh(joined, sizes, 30)
    return mesh.groups(sizes), {name: torch.distributed.get_process_group_ranks(grid.get_group(name)) for name in sizes}


@pytest.mark.ranks(4)
def test_groups_are_those_of_torchs_mesh(ranks: Ranks) -> None:
    for rank, (said, real) in enumerate(ranks(4, grid_groups)):
        assert {name: [list(group) for group in said[name] if rank in group] for name in said} == {
            name: [group] for name, group in real.items()
        }


def test_the_learning_rate_follows_the_batch() -> None:
    assert optimizer.scaled(0.1, "linear", 256, 1024) == pytest.approx(0.4)
    assert optimizer.scaled(0.1, "sqrt", 256, 1024) == pytest.approx(0.2)
    assert optimizer.scaled(0.1, "none", None, 1024) == 0.1
    with pytest.raises(UserError, match="lr_batch is missing"):
        optimizer.scaled(0.1, "linear", None, 1024)
