"""The pieces for a script of one's own, each without the others."""

import doctest
import importlib
import json
import os
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import slurmddp.runtime
from slurmddp.runtime import GlobalSampler
from slurmddp.runtime.errors import UserError
from slurmddp.shared.checkpoint.checkpoints import Checkpoints

from .harness import PATIENCE, ROOT, Failed, Ranks

PIECES = ("sampler", "shared", "setup", "checkpointer", "groups")
PYTHON = sys.executable


def script(text: str, cwd: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    """A script without torchrun."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        [PYTHON, "-c", text], cwd=cwd, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )


# --- the names


def test_every_name_is_there_and_nothing_else_is_promised() -> None:
    for name in slurmddp.runtime.__all__:
        assert getattr(slurmddp.runtime, name).__name__ == name
    assert set(slurmddp.runtime.__all__) <= set(dir(slurmddp.runtime))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = slurmddp.runtime.nothing  # type: ignore[attr-defined]


def test_the_package_itself_does_not_import_torch(tmp_path: Path) -> None:
    text = "import sys, slurmddp.runtime, slurmddp.shared.batch; dir(slurmddp.runtime)"
    done = script(text + "; assert 'torch' not in sys.modules", tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_pieces_import_neither_dcp_nor_anything_of_the_login_side(tmp_path: Path) -> None:
    """torch.distributed.checkpoint alone takes seconds to import, before the first line of the script."""
    heavy = {"torch.distributed.checkpoint", "sympy", "numpy", "pydantic", "typer", "jinja2", "yaml"}
    names = ", ".join(slurmddp.runtime.__all__)
    new = "{*sys.modules} - before"
    text = f"import sys, torch\nbefore = {{*sys.modules}}\nfrom slurmddp.runtime import {names}\n"
    done = script(f"{text}assert not {heavy} & ({new}), {new}", tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.ranks(1)
def test_the_examples_in_the_documentation(ranks: Ranks) -> None:
    """In a process of their own: signals are noted there."""
    for failed, tried in ranks(1, _run_examples)[0]:
        assert tried > 0 and failed == 0


def _run_examples(world: Any) -> list[tuple[int, int]]:
    torch.distributed.destroy_process_group()
    names = [f"slurmddp.runtime.library.{name}" for name in PIECES] + [
        "slurmddp.runtime.measure.meter",
        "slurmddp.runtime.measure.timing",
    ]
    for name in ("RANK", "WORLD_SIZE"):
        del os.environ[name]
    return [tuple(doctest.testmod(importlib.import_module(name), raise_on_error=False))[:2] for name in names]  # type: ignore[misc]


# --- GlobalSampler


def stream(
    ranks: int, *, micro: int | None = None, steps: int = 9, state: dict[str, int] | None = None
) -> list[set[int]]:
    """Ids of each global batch of 7, of 23 samples, put together from all ranks."""
    taken: list[list[int]] = [[] for _ in range(steps)]
    for rank in range(ranks):
        sampler = GlobalSampler(23, global_batch=7, seed=5, micro=micro, rank=rank, ranks=ranks)
        if state:
            sampler.load_state_dict(state)
        lists = list(chain.from_iterable(iter(sampler) for _ in range(3)))
        assert all(lists) and (micro is None or max(map(len, lists)) <= micro)
        for number, ids in enumerate(lists[: steps * sampler.accumulation]):
            taken[number // sampler.accumulation] += ids
    assert all(len(ids) == 7 for ids in taken)
    return [set(ids) for ids in taken]


@pytest.mark.parametrize(("ranks", "micro"), [(2, None), (3, None), (7, None), (1, 2), (3, 2), (4, 1)])
def test_the_same_samples_on_any_number_of_ranks(ranks: int, micro: int | None) -> None:
    assert stream(ranks, micro=micro) == stream(1)


def test_every_sample_comes_once_an_epoch_and_none_is_lost() -> None:
    sampler = GlobalSampler(23, global_batch=7, seed=5)
    row = [index for _ in range(7) for ids in sampler for index in ids]  # 7 epochs are 23 steps: they end together.
    assert len(row) == 7 * 23
    assert all(sorted(row[23 * epoch : 23 * epoch + 23]) == list(range(23)) for epoch in range(7))
    assert row[:23] != row[23:46]
    assert (sampler.step, sampler.samples, sampler.epoch) == (23, 161, 7)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_it_goes_on_from_a_position_in_the_middle_of_an_epoch(ranks: int) -> None:
    state = GlobalSampler(23, global_batch=7, seed=5).state_dict(step=5)
    assert state == {"step": 5, "samples": 35, "seed": 5, "length": 23, "global_batch": 7}
    assert json.loads(json.dumps(state)) == state
    assert stream(ranks, steps=4, state=state) == stream(1)[5:]


def test_another_global_batch_goes_on_where_the_samples_were() -> None:
    before = GlobalSampler(23, global_batch=7, seed=5)
    row = [index for ids in before for index in ids]
    after = GlobalSampler(23, global_batch=4, seed=5)
    after.load_state_dict(before.state_dict(step=2))
    assert (after.step, after.samples, after.state_dict(step=4)["samples"]) == (2, 14, 22)
    assert next(iter(after)) == row[14:18]


def test_epochs_that_are_done_give_nothing_and_later_ones_are_refused() -> None:
    sampler = GlobalSampler(10, global_batch=4)
    sampler.start_at(12)
    seen = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        assert (sampler.epoch, len(sampler)) == (epoch, [0, 2, 3][epoch])
        seen.append(len(list(sampler)))
    assert seen == [0, 2, 3]
    with pytest.raises(UserError, match="epoch 4 was set after 32 samples, in the middle of epoch 3"):
        sampler.set_epoch(4)
    one_batch_is_many_epochs = GlobalSampler(3, global_batch=8)
    assert [len(list(one_batch_is_many_epochs)) for _ in range(2)] == [1, 1]


def test_an_iteration_that_was_left_does_not_count_and_a_new_position_does() -> None:
    sampler = GlobalSampler(10, global_batch=4)
    first = next(iter(sampler))
    assert next(iter(sampler)) == first and sampler.step == 0
    running = iter(sampler)
    next(running)
    sampler.start_at(20)
    list(running)
    assert (sampler.step, sampler.samples) == (5, 20)


def test_mistakes_are_named() -> None:
    with pytest.raises(UserError, match="leaves some of 3 ranks without samples"):
        GlobalSampler(10, global_batch=2, rank=0, ranks=3)
    with pytest.raises(UserError, match="length 0"):
        GlobalSampler(0, global_batch=2)
    state = GlobalSampler(10, global_batch=2).state_dict(step=1)
    with pytest.raises(UserError, match="length was 10 and is now 11"):
        GlobalSampler(11, global_batch=2).load_state_dict(state)
    with pytest.raises(UserError, match="seed was 0 and is now 1"):
        GlobalSampler(10, global_batch=2, seed=1).load_state_dict(state)


@pytest.mark.ranks(3)
def test_weights_of_uneven_shares_give_the_gradient_of_one_process(ranks: Ranks) -> None:
    rows = torch.arange(20.0, dtype=torch.float64).reshape(10, 2).sin()
    ids = next(iter(GlobalSampler(10, global_batch=7, seed=2)))
    weight = torch.ones(2, dtype=torch.float64, requires_grad=True)
    ((rows[ids] @ weight).exp()).mean().backward()
    assert weight.grad is not None
    for by_weight, by_count in ranks(3, _gradients):
        assert by_weight == pytest.approx(weight.grad.tolist(), rel=1e-12)
        assert by_count == pytest.approx(weight.grad.tolist(), rel=1e-12)


def _gradients(world: Any) -> list[list[float]]:
    from slurmddp.runtime import mean_over_ranks

    rows = torch.arange(20.0, dtype=torch.float64).reshape(10, 2).sin()
    sampler = GlobalSampler(10, global_batch=7, seed=2)
    ids = next(iter(sampler))
    found = []
    for weigh in (lambda losses: losses.sum() * sampler.weight, lambda losses: mean_over_ranks(losses.sum(), len(ids))):
        model = nn.Linear(2, 1, bias=False, dtype=torch.float64)
        nn.init.ones_(model.weight)
        together = nn.parallel.DistributedDataParallel(model)
        weigh(together(rows[ids]).exp()).backward()
        assert model.weight.grad is not None
        found.append(model.weight.grad[0].tolist())
    return found


# --- should_stop, with a process group of the script's own


@pytest.mark.ranks(3)
def test_all_ranks_get_the_answer_in_the_same_step(ranks: Ranks, tmp_path: Path) -> None:
    seen = ranks(3, _steps_to_the_stop, tmp_path / "stop")
    assert seen == [[False, False, True, True]] * 3


def _steps_to_the_stop(world: Any, path: Path) -> list[bool]:
    from slurmddp.runtime import should_stop
    from slurmddp.runtime.library import shared
    from slurmddp.runtime.watch.stop import Stop

    now = shared.get()
    now.stop = Stop(path if world.rank == 1 else None, interval=0)
    seen = []
    for step in range(4):
        if step == 2 and world.rank == 1:
            path.write_text("enough")
        seen.append(should_stop())
    assert now.stopped == "enough"
    return seen


def test_a_piece_before_the_process_group_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from slurmddp.runtime import should_stop

    told = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match="rank 1 of 2, and there is no process group yet"):
        should_stop()


# --- Checkpointer


def trained(kind: str, steps: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    bare = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Linear(12, 1))
    model: nn.Module = bare
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(bare)
    if kind == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(bare, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.5, 0.9))
    rows = torch.arange(24.0).reshape(4, 6).cos()
    for _ in range(steps):
        model(rows).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def summary(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Of the whole state, from shards or not."""

    def number(tensor: torch.Tensor) -> float:
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        return float(whole.double().square().sum())

    weights = {name.removeprefix("module."): number(value) for name, value in model.state_dict().items()}
    moments = [number(optimizer.state[parameter]["exp_avg"]) for parameter in model.parameters()]
    return {"weights": weights, "moments": moments, "lr": optimizer.param_groups[0]["lr"]}


@pytest.mark.ranks(3)
def test_saved_by_one_kind_of_model_and_loaded_by_another(ranks: Ranks, tmp_path: Path) -> None:
    saved = ranks(2, _save, "ddp", tmp_path / "a", 7)
    for size, kind in ((1, "plain"), (2, "ddp"), (3, "fsdp")):
        for state, found in ranks(size, _load, kind, tmp_path / "a"):
            assert state == (7, {"best": [1, 2.5, None]}, 2)
            assert found["weights"] == pytest.approx(saved[0]["weights"], rel=1e-6)
            assert found["moments"] == pytest.approx(saved[0]["moments"], rel=1e-6)
            assert found["lr"] == 0.025
    sharded = ranks(2, _save, "fsdp", tmp_path / "b", 8)[0]
    state, found = ranks(1, _load, "plain", tmp_path / "b")[0]
    assert state[0] == 8 and found["weights"] == pytest.approx(sharded["weights"], rel=1e-6)
    assert Checkpoints.verify(tmp_path / "b" / "step-00000008").mesh == {"replicate": 1, "shard": 2}


def _save(world: Any, kind: str, folder: Path, step: int) -> dict[str, Any]:
    from slurmddp.runtime import Checkpointer

    model, optimizer = trained(kind)
    optimizer.param_groups[0]["lr"] = 0.025  # As a scheduler does.
    checkpointer = Checkpointer(model, optimizer, folder)
    checkpointer.save(step, {"best": [1, 2.5, None]})
    checkpointer.finish()
    return summary(model, optimizer)


def _load(world: Any, kind: str, folder: Path) -> tuple[Any, dict[str, Any]]:
    from slurmddp.runtime import Checkpointer

    model, optimizer = trained(kind, steps=0)
    state = Checkpointer(model, optimizer, folder).load()
    assert state is not None and isinstance(optimizer.param_groups[0]["betas"], tuple)
    return (state.step, state.extra, state.ranks), summary(model, optimizer)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["MultiStepLR", "SequentialLR", "ReduceLROnPlateau"])
def test_a_scheduler_continues_with_the_rates_of_the_undisturbed_run(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    """What JSON could not hold is among their states: a Counter, and infinity."""
    undisturbed = ranks(2, _rates, tmp_path / "a", kind, 8)[0]
    assert len(set(undisturbed)) > 2
    began = ranks(2, _rates, tmp_path / "b", kind, 3)[0]
    for continued in (*ranks(1, _rates, tmp_path / "b", kind, 8), *ranks(2, _rates, tmp_path / "b", kind, 8)):
        assert began + continued == undisturbed


def _rates(world: Any, folder: Path, kind: str, end: int) -> list[float]:
    """The learning rate of each step up to `end`, from the checkpoint of step 3 if there is one."""
    from torch.optim import lr_scheduler as of

    from slurmddp.runtime import Checkpointer

    model, optimizer = trained("plain")
    scheduler: Any = {
        "MultiStepLR": lambda: of.MultiStepLR(optimizer, [2, 5]),
        "ReduceLROnPlateau": lambda: of.ReduceLROnPlateau(optimizer, patience=1),
        "SequentialLR": lambda: of.SequentialLR(
            optimizer, [of.LinearLR(optimizer, total_iters=4), of.ExponentialLR(optimizer, 0.5)], milestones=[4]
        ),
    }[kind]()
    checkpointer = Checkpointer(model, optimizer, folder, scheduler=scheduler, every_steps=3, keep_every=3)
    rates = []
    for step in range(checkpointer.resume() + 1, end + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step(*([1.0] if kind == "ReduceLROnPlateau" else []))
        if checkpointer.due(step) and step == 3:
            checkpointer.save(step)
    checkpointer.finish()
    return rates


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("made", "steps"), [(True, 2), (False, 1)])
def test_a_loop_that_is_left_counts_its_last_step_where_one_was_made(
    ranks: Ranks, tmp_path: Path, made: bool, steps: int
) -> None:
    assert ranks(2, _leave_in_the_second_batch, tmp_path, made) == [steps, steps]


def _leave_in_the_second_batch(world: Any, folder: Path, made: bool) -> int:
    from slurmddp.runtime import Checkpointer

    model, optimizer = trained("ddp", steps=0)
    checkpointer = Checkpointer(model, optimizer, folder)
    _, batches = checkpointer.follow([torch.ones(4, 6), torch.zeros(4, 6), torch.ones(4, 6)])
    for number, rows in enumerate(batches):
        if number == 1 and not made:
            break
        model(rows).square().sum().backward()
        optimizer.step()
        if number == 1:
            break
    checkpointer.finish()
    return Checkpointer(*trained("ddp", steps=0), folder).resume()


@pytest.mark.ranks(2)
def test_the_copies_are_of_the_step_that_was_saved(ranks: Ranks, tmp_path: Path) -> None:
    """Steps go on while it is being written."""
    for saved, loaded in ranks(2, _save_and_go_on, tmp_path):
        assert loaded == saved


def _save_and_go_on(world: Any, folder: Path) -> tuple[Any, Any]:
    from slurmddp.runtime import Checkpointer

    model, optimizer = trained("ddp")
    checkpointer = Checkpointer(model, optimizer, folder, keep=2)
    saved = summary(model, optimizer)
    checkpointer.save(3)
    for _ in range(3):
        model(torch.ones(4, 6)).square().sum().backward()
        optimizer.step()
    checkpointer.finish()
    assert summary(model, optimizer) != saved
    assert checkpointer.resume() == 3
    return saved, summary(model, optimizer)


@pytest.mark.ranks(2)
def test_a_bad_one_is_refused_by_name_and_older_runs_are_looked_through(ranks: Ranks, tmp_path: Path) -> None:
    old, new = tmp_path / "old" / "checkpoints", tmp_path / "new" / "checkpoints"
    ranks(2, _save, "ddp", old, 5)
    ranks(2, _save, "ddp", new, 9)
    shard = new / "step-00000009" / "__1_0.distcp"
    shard.write_bytes(bytes([shard.read_bytes()[0] ^ 1]) + shard.read_bytes()[1:])
    events = tmp_path / "new" / "events.jsonl"
    assert ranks(2, _load_with, {"SLURMDDP_RUN": str(new.parent)}) == [None, None]
    assert ranks(2, _load_with, {"SLURMDDP_RUN": str(new.parent), "SLURMDDP_RESUME_FROM": f"/nothing:{old}"}) == [5, 5]
    kinds = [json.loads(line) for line in events.read_text().splitlines()]
    assert [item["event"] for item in kinds] == ["checkpoint_rejected", "checkpoint_rejected", "resumed"]
    assert kinds[0]["file"] == "__1_0.distcp" and kinds[2]["path"] == str(old / "step-00000005")


def _load_with(world: Any, variables: dict[str, str]) -> int | None:
    from slurmddp.runtime import Checkpointer

    os.environ |= variables
    try:
        state = Checkpointer(*trained("ddp", steps=0)).load()
    finally:
        for name in variables:
            del os.environ[name]
    return state.step if state else None


@pytest.mark.ranks(2)
def test_when_a_checkpoint_is_due(ranks: Ranks, tmp_path: Path) -> None:
    for by_step, by_clock, after in ranks(2, _due, tmp_path):
        assert by_step == [False, False, True, False, False, True]
        assert by_clock == [False, True, False]
        assert after == [False, False, True]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def _due(world: Any, folder: Path) -> tuple[list[bool], list[bool], list[bool]]:
    from slurmddp.runtime import Checkpointer
    from slurmddp.runtime.library import shared

    model, optimizer = trained("ddp")
    steps = Checkpointer(model, optimizer, folder, every_steps=3)
    by_step = [steps.due(step) for step in range(1, 7)]
    clock = Checkpointer(model, optimizer, folder, every_seconds=100)
    by_clock = [clock.due(1)]
    if world.is_main:  # Its clock alone decides.
        clock._clock_from -= 200
    by_clock.append(clock.due(2))
    clock.save(2)
    clock.finish()
    by_clock.append(clock.due(3))
    after = []
    for step in (1, 2, 3):
        if step == 3 and not world.is_main:
            shared.get().stop.request("enough")
        after.append(clock.after(step))
    return by_step, by_clock, after


@pytest.mark.ranks(2)
def test_a_failure_to_write_is_never_silent(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Failed) as failed:
        ranks(2, _save, "plain", tmp_path / "file" / "below", 1)
    assert {name for name, _ in failed.value.failures.values()} == {"RuntimeFailure"}
    assert "the checkpoint of step 1 could not be written" in failed.value.failures[1][1]


@pytest.mark.ranks(2)
def test_what_does_not_fit_is_the_users_to_put_right(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, _save, "ddp", tmp_path / "a", 1)
    messages = {
        "model": "cannot resume from .*step-00000001: it is of another model: 0.weight: .12, 6. in the checkpoint",
        "optimizer": "cannot resume from .* saved with the optimizer AdamW, but this run uses SGD",
        "groups": "cannot resume from .* the optimizer had 1 parameter groups and now has 2",
        "scheduler": "cannot resume from .* saved with no scheduler, but this run uses StepLR",
        "function": "the state of Odd is not only tensors and plain values: ",
        "extra": "must be JSON values",
    }
    for what, message in messages.items():
        with pytest.raises(Failed, match=message) as failed:
            ranks(2, _misfit, tmp_path / "a", what)
        assert {name for name, _ in failed.value.failures.values()} == {"UserError"}


class Odd:
    """Its state could only be loaded by running what the file names."""

    def state_dict(self) -> dict[str, Any]:
        return {"step": _misfit}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError


def _misfit(world: Any, folder: Path, what: str) -> None:
    from slurmddp.runtime import Checkpointer

    model, optimizer = trained("plain", steps=0)
    if what == "model":
        model = nn.Sequential(nn.Linear(5, 12), nn.BatchNorm1d(12), nn.Linear(12, 1))
    if what == "optimizer":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if what == "groups":
        first, *others = model.parameters()
        optimizer = torch.optim.AdamW([{"params": [first]}, {"params": others}])
    scheduler = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "function": Odd()}.get(what)
    checkpointer = Checkpointer(model, optimizer, folder, scheduler=scheduler)
    if what == "extra":
        checkpointer.save(2, {"best": torch.ones(1)})
    if what == "function":
        checkpointer.save(2)
    checkpointer.load()


# --- without slurmddp

ALONE = """
import os, signal, torch
from slurmddp.runtime import Checkpointer, should_stop
ranks = int(os.environ.get("WORLD_SIZE", "1"))
model = torch.nn.Linear(2, 1)
if ranks > 1:
    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
checkpointer = Checkpointer(model, optimizer)
os.chdir("/")
first = checkpointer.resume() + 1
for step in range(first, 6):
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    if step == 3 and int(os.environ.get("RANK", "0")) == ranks - 1:
        os.kill(os.getpid(), getattr(signal, os.environ["SIGNAL"]))
    if should_stop():
        checkpointer.save(step)
        break
checkpointer.finish()
print(f"rank {os.environ.get('RANK', '0')}: steps {first} to {step}\\n", end="")  # in one piece: two ranks write
"""


@pytest.mark.parametrize(("ranks", "name"), [pytest.param(0, "SIGTERM", marks=pytest.mark.long), (2, "SIGUSR1")])
def test_a_script_stops_and_resumes_under_plain_python_and_torchrun(tmp_path: Path, ranks: int, name: str) -> None:
    """One rank gets the signal, and all stop after the same step."""
    (tmp_path / "alone.py").write_text(ALONE)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    foreign = {key: value for key, value in os.environ.items() if not key.startswith(("SLURMDDP_", "SLURM_"))}
    environment = {**foreign, "PYTHONPATH": str(ROOT), "SIGNAL": name, "OMP_NUM_THREADS": "1"}
    for steps in ("1 to 3", "4 to 5"):
        command = [PYTHON, *launcher, "alone.py"]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        assert done.returncode == 0, done.stderr
        ends = sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))
        assert ends == [f"rank {rank}: steps {steps}" for rank in range(ranks or 1)]
    assert f"resumed    step 3 from {tmp_path}/checkpoints/step-00000003, " in done.stdout


# --- distributed, alone

ENDS = """
import os, signal, sys, multiprocessing
from slurmddp.runtime import distributed, should_stop
def child():
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
def work(how):
    with distributed() as world:
        print("began", world.size, flush=True)
        if how == "raise":
            raise ValueError("no such thing")
        if how == "user":
            from slurmddp.runtime.errors import UserError
            raise UserError("the data is missing", shared=True)
        if how == "exit 0":
            sys.exit(0)
        if how == "exit 3":
            sys.exit(3)
        if how == "stop":
            process = multiprocessing.get_context("fork").Process(target=child)
            process.start()
            process.join()
            os.kill(os.getpid(), signal.SIGTERM)
            while not should_stop():
                pass
            sys.exit(process.exitcode)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    print("behind it")
work(sys.argv[1] if len(sys.argv) > 1 else os.environ["HOW"])
"""


@pytest.mark.parametrize(
    ("how", "code", "output"),
    [
        ("raise", 1, ""),
        ("user", 1, ""),
        *(pytest.param(how, code, "", marks=pytest.mark.long) for how, code in (("exit 0", 0), ("exit 3", 3))),
        ("well", 0, "behind it\n"),
    ],
)
def test_how_a_process_ends(tmp_path: Path, how: str, code: int, output: str) -> None:
    done = script(ENDS, tmp_path, HOW=how, SLURMDDP_NODE="here")
    assert (done.returncode, done.stdout) == (code, "began 1\n" + output), done.stderr
    if how == "raise":
        lines = done.stderr.splitlines()
        assert all(line.startswith("rank 0 on here: ") for line in lines) and lines[-1].endswith("no such thing")
    if how == "user":
        assert done.stderr == "rank 0 on here: error: the data is missing\n"


def test_a_stop_leaves_a_marker_and_the_attempt_does_not_begin_again(tmp_path: Path) -> None:
    told = {"HOW": "stop", "SLURMDDP_RUN": str(tmp_path), "SLURMDDP_NODE": "here", "SLURMDDP_ATTEMPT": "2"}
    began = time.time()
    done = script(ENDS, tmp_path, **told)
    assert (done.returncode, done.stdout) == (0, "began 1\nstopping   SIGTERM received by rank 0 on here\n"), (
        done.stderr
    )
    marker = json.loads((tmp_path / "markers" / "attempt-002.json").read_text())
    assert marker.pop("time") >= began - 1
    assert marker == {
        "schema": 1, "state": "stopped", "cause": "", "step": None, "steps": None, "validation": None, "attempt": 2,
        "reason": "SIGTERM received by rank 0 on here", "signal": {"name": "SIGTERM", "rank": 0, "node": "here"},
        "rank": None, "node": "",
    }  # fmt: skip
    again = script(ENDS, tmp_path, **told)
    assert (again.returncode, again.stdout) == (0, "attempt 2 is already over: nothing to do\n")
