"""Saving while training goes on: what is saved, and what is left when a rank, a disk or the power fails."""

import contextlib
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from slurmddp.runtime import randomness
from slurmddp.runtime.checkpoint import reader, shards, state
from slurmddp.runtime.checkpoint.saving import Saved
from slurmddp.runtime.world import World
from slurmddp.shared.checkpoint import layout
from slurmddp.shared.checkpoint.checkpoints import Checkpoints

from . import saving
from .harness import HERE, PATIENCE, ROOT, Ranks, free_port
from .saving import change, copies, data, gate, good, load, make, same, save_now, short, writer


def _save_and_go_on(world: World, root: Path) -> None:
    trained, save = make(), writer(root, world)
    random_states = randomness.states(world.device)["torch"]
    with gate({0, 1}, world) as opened:
        then = copies(trained)
        stall = save.begin(trained, step=1, data=data(1))
        assert save.busy and save.poll() == []
        save.copied()
        change(trained, 7.0)
        torch.rand(5)
        opened.set()
        (saved,) = save.finish()
    assert isinstance(saved, Saved) and saved.seconds >= saved.stall == stall > 0 and saved.remark == ""
    assert not save.busy and save.finish() == []
    Checkpoints.verify(saved.path)
    assert same(load(saved.path), then)
    own = torch.load(saved.path / "rng" / f"rank-{world.rank:05d}.pt", weights_only=True)
    assert torch.equal(own["torch"], random_states)
    save.close()


@pytest.mark.ranks(2)
def test_what_is_saved_is_the_state_at_the_beginning(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, _save_and_go_on, tmp_path)


def _plan_once(world: World, root: Path) -> list[int]:
    trained, save = make(), writer(root, world, keep=9)
    save.prepare(trained)
    planned = mock.patch.object(shards, "plan", wraps=shards.plan)
    with planned as plan:
        for step in (1, 2, 3):
            change(trained, float(step))
            save.begin(trained, step=step, data=data(step))
        assert plan.call_count == 0
        trained = make(8, 24)  # Other shapes, and the same names.
        save.begin(trained, step=4, data=data(4))
        staged = save._staging.bytes  # type: ignore[union-attr]
        assert plan.call_count == 1
    assert short(save.finish())[-1] == (4, "step-00000004")
    for step in (1, 2, 3):
        assert all((tensor == step).all() for tensor in load(root / f"step-{step:08d}").values())
    assert same(load(root / "step-00000004"), copies(trained))
    return [staged, sum(tensor.nbytes for tensor in state.collect(trained).values())]


@pytest.mark.ranks(2)
def test_one_plan_serves_all_saves_and_each_rank_copies_its_own_part(ranks: Ranks, tmp_path: Path) -> None:
    (first, whole), (second, _) = ranks(2, _plan_once, tmp_path)
    assert first + second == whole, "each tensor is copied by one rank"
    assert abs(first - second) < whole / 3


def _one_at_a_time(world: World, root: Path, asynchronous: bool) -> None:
    trained, save = make(), writer(root, world, asynchronous=asynchronous, keep=1, keep_every=2)
    for step in (1, 2, 3):
        save.begin(trained, step=step, data=data(step))
        assert asynchronous or not save.busy
        with gate({0}, world):
            assert all(path.name.startswith((".saving", "step")) for path in root.iterdir())
    assert short(save.finish()) == [(step, f"step-{step:08d}") for step in (1, 2, 3)]
    assert good(root) == [3, 2], "the last one, and multiples of two"
    assert world.gather(sorted(path.name for path in root.iterdir()))[0] == ["step-00000002", "step-00000003"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("asynchronous", [True, False])
def test_one_at_a_time_and_the_kept_ones_stay(ranks: Ranks, tmp_path: Path, asynchronous: bool) -> None:
    ranks(2, _one_at_a_time, tmp_path, asynchronous)


class _Uneven(nn.Module):
    """Sharded over two ranks: evenly, unevenly, with nothing for one of them; and not at all."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        try:
            from torch.distributed.tensor import Replicate, Shard, distribute_tensor
        except ImportError:  # torch < 2.5
            from torch.distributed._tensor import Replicate, Shard, distribute_tensor

        torch.manual_seed(1)
        for name, shape, placement in (
            ("even", (8, 4), Shard(0)),
            ("uneven", (5, 3), Shard(0)),
            ("single", (1, 3), Shard(0)),
            ("columns", (4, 6), Shard(1)),
            ("same", (3, 3), Replicate()),
        ):
            value = torch.randn(shape)
            self.register_parameter(name, nn.Parameter(distribute_tensor(value, mesh, [placement]) if mesh else value))
        self.plain = nn.Parameter(torch.randn(2, 2))


def _sharded(mesh: Any) -> state.Trained:
    model = _Uneven(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return state.Trained(model, optimizer, torch.amp.GradScaler("cpu", enabled=False))


def _save_shards(world: World, root: Path) -> list[int]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    trained, save = _sharded(mesh), writer(root, world, mesh={"shard": 2})
    with gate({0, 1}, world) as opened:
        save.begin(trained, step=1, data=data(1))
        then = copies(trained)
        for parameter in trained.model.parameters():
            parameter.data.mul_(2)
        opened.set()
        save.finish()
    save.begin(trained, step=2, data=data(2))
    (saved,) = save.finish()
    assert isinstance(saved, Saved)
    assert Checkpoints.verify(saved.path).mesh == {"shard": 2}
    assert same(load(root / "step-00000001"), then)
    assert same(load(saved.path), copies(trained))
    for other in (mesh, None):  # Into shards again, and into whole tensors.
        model = _Uneven(other)
        fresh = state.Trained(model, torch.optim.AdamW(model.parameters()), trained.scaler)
        reader.load(reader.Choice(saved.path, 2, 2, {}), fresh, world)
        assert same(copies(fresh), copies(trained))
    assert save._staging is not None
    return [save._staging.bytes, sum(tensor.nbytes for tensor in copies(trained).values())]


@pytest.mark.ranks(2)
def test_shards_are_saved_by_those_who_hold_them(ranks: Ranks, tmp_path: Path) -> None:
    (first, whole), (second, _) = ranks(2, _save_shards, tmp_path)
    assert first + second == whole


def _fail(world: World, root: Path, what: str, failing: int) -> list[list[tuple[Any, ...]]]:
    """Saves 1 and 2, of which 2 fails, or neither where `what` says "first"; then 3."""
    trained, save = make(), writer(root, world)
    if what != "first":
        save_now(save, trained, 1)
    ended = []
    name = "runtime.checkpoint.shards.write" if what in ("first", "write") else f"shared.checkpoint.layout.{what}"
    broken = mock.patch(f"slurmddp.{name}", side_effect=OSError(5, "Input/output error", "disk"))
    with broken if world.rank == failing else contextlib.nullcontext():
        save.begin(trained, step=2, data=data(2))
        ended.append(short(save.finish()))
    assert world.gather(good(root))[0] == ([] if what == "first" else [1])
    names = sorted(path.name for path in root.iterdir())
    assert names == ([] if what == "first" else ["step-00000001"]), "nothing half done is left"
    world.gather(None)
    change(trained, 3.0)
    save.begin(trained, step=3, data=data(3))
    ended.append(short(save.finish()))
    return ended


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("what", "failing"),
    [("write", 1), ("write", 0), ("first", 1), ("write_json", 0), ("mark_complete", 0), ("sync_folder", 0)],
)
def test_a_failed_save_is_told_to_all_and_training_goes_on(
    ranks: Ranks, tmp_path: Path, what: str, failing: int
) -> None:
    first, second = ranks(2, _fail, tmp_path, what, failing)
    message = f"rank {failing} on node{failing}: [Errno 5] Input/output error: 'disk'"
    assert first == second == [[(2, message, what != "first", False)], [(3, "step-00000003")]]


def _fail_to_prune(world: World, root: Path) -> list[tuple[Any, ...]]:
    trained, save = make(), writer(root, world, keep=1)
    save_now(save, trained, 1)
    with mock.patch("slurmddp.shared.checkpoint.layout.discard", side_effect=PermissionError(13, "no", "x")):
        save.begin(trained, step=2, data=data(2))
        (saved,) = save.finish()
    assert isinstance(saved, Saved)
    return [(saved.step, saved.remark)]


@pytest.mark.ranks(2)
def test_a_save_stands_where_only_the_old_cannot_go(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(2, _fail_to_prune, tmp_path)
    assert first == second == [(2, "old checkpoints could not be removed: [Errno 13] no: 'x'")]
    assert good(tmp_path) == [2, 1]


# --- a full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no small file system can be mounted: {made.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def _fill_the_disk(world: World, disk: Path, free: list[int]) -> list[list[tuple[Any, ...]]]:
    """Saves, each with so much room as `free` says, and one with enough after each."""
    root, trained, ended = disk / "checkpoints", make(100, 200), []
    save = writer(root, world, keep=1)
    save_now(save, trained, 1)
    for number, room in enumerate(free):
        step = 2 + 2 * number
        change(trained, float(step))
        world.on_main(lambda room=room: _leave(disk, room))
        save.begin(trained, step=step, data=data(step))
        ended.append(short(save.finish()))
        world.on_main((disk / "ballast").unlink)
        newest = step if len(ended[-1][0]) == 2 else step - 1
        assert world.gather(good(root))[0] == [newest], "the last complete one is whole"
        assert world.gather([path.name for path in root.iterdir()])[0] == [f"step-{newest:08d}"]
        change(trained, float(step + 1))
        save.begin(trained, step=step + 1, data=data(step + 1))
        assert short(save.finish()) == [(step + 1, f"step-{step + 1:08d}")]
        assert all((tensor == step + 1).all() for tensor in load(root / f"step-{step + 1:08d}").values())
    return ended


def _leave(disk: Path, room: int) -> None:
    facts = os.statvfs(disk)
    (disk / "ballast").write_bytes(b"\0" * max(facts.f_bavail * facts.f_frsize - room, 0))


@pytest.mark.ranks(2)
def test_a_full_disk_loses_nothing(ranks: Ranks, small_disk: Path) -> None:
    free = [0, *range(4096, 400_000, 16384)]
    first, second = ranks(2, _fill_the_disk, small_disk, free)
    assert first == second
    failed = [one for ((_, *one),) in first if len(one) == 3]
    assert 5 < len(failed) < len(free), "both kinds are among them"
    assert all("No space left on device" in message and older and not fatal for message, older, fatal in failed)
    assert any(".distcp" in message for message, *_ in failed), "the file is named"


# --- ranks that die, and the usual ways beside ours


@pytest.mark.ranks(2)
def test_a_rank_that_dies_mixes_nothing(tmp_path: Path) -> None:
    pytest.importorskip("numpy", reason="torch's own save needs it")
    usual, own = tmp_path / "usual", tmp_path / "own"
    assert saving.end(saving.start(2, saving.die_while_saving, usual, False)) == [0, -signal.SIGKILL]
    values = {float(tensor.flatten()[0]) for tensor in load(usual).values()}
    assert values == {1.0, 2.0}, "DCP alone, in place: loads without an error, and is of two steps"
    assert saving.end(saving.start(2, saving.die_while_saving, own, True)) == [0, -signal.SIGKILL]
    choice = reader.choose([own], lambda one: None)
    assert choice is not None and choice.step == 1
    assert {float(tensor.flatten()[0]) for tensor in load(choice.path).values()} == {1.0}
    Checkpoints(own).remove_leftovers(0)
    assert [path.name for path in own.iterdir()] == ["step-00000001"]


def _save_one(world: World, root: Path) -> None:
    trained = make()
    change(trained, 3.0)
    save_now(writer(root, world), trained, 1)


def test_a_flipped_bit_is_found(ranks: Ranks, tmp_path: Path) -> None:
    ranks(1, _save_one, tmp_path)
    folder = tmp_path / "step-00000001"
    shard = folder / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[content.index(struct.pack("<f", 3.0) * 8) + 3] ^= 2
    shard.write_bytes(content)
    stored = shards.read_metadata(folder).state_dict_metadata
    tensors = {name: torch.empty(item.size) for name, item in stored.items()}
    dcp.load(tensors, checkpoint_id=folder)
    values = {float(value) for tensor in tensors.values() for value in tensor.flatten()}
    assert len(values) == 2 and 3.0 in values, "DCP alone: another value, and no error"
    with pytest.raises(layout.Rejected, match=r"__0_0\.distcp: has other content"):
        Checkpoints.verify(folder)


def _delete_then_write(world: World, root: Path) -> None:
    """The usual way of keeping one: make room first."""
    shutil.rmtree(root / "step-00000001")
    saving.save_second(world, root)


@pytest.mark.parametrize(
    ("save", "loses"), [(saving.save_second, False), pytest.param(_delete_then_write, True, marks=pytest.mark.long)]
)
def test_dying_before_any_file_system_action(tmp_path: Path, save: Callable[[World, Path], None], loses: bool) -> None:
    first = tmp_path / "first"
    assert saving.end(saving.start(1, saving.save_first, first)) == [0]
    left = []
    code: int | None = 9
    while code == 9 and [] not in left:
        root = tmp_path / f"death-{len(left)}"
        shutil.copytree(first, root)
        (code,) = saving.end(saving.start(1, saving.die_at, root, len(left), save))
        left.append(good(root))
        Checkpoints(root).remove_leftovers(0)
        assert good(root) == left[-1]
        assert not [path for path in root.iterdir() if path.name.startswith(".")]
    assert ([] in left) == loses
    if not loses:
        assert code == 0 and len(left) > 15, "it died in many places, and in the end it did not"
        assert left[0] == [1] and left[-1] == [2]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("times", [2, pytest.param(5, marks=pytest.mark.long)])
def test_killed_at_random_a_good_one_is_always_left(tmp_path: Path, times: int) -> None:
    chance = random.Random(5)
    before = 0
    for attempt in range(times):
        ranks = saving.start(2, saving.save_without_end, tmp_path, attempt, 1 + attempt % 2)
        limit = time.monotonic() + 60
        checkpoints = Checkpoints(tmp_path)
        while max((step for step, path in checkpoints.folders() if layout.is_complete(path)), default=0) < before + 2:
            assert time.monotonic() < limit and all(rank.is_alive() for rank in ranks)
            time.sleep(0.01)
        time.sleep(chance.random() * 0.1)
        for rank in chance.sample(ranks, 2):
            rank.kill()
            time.sleep(chance.choice([0.0, 0.01]))
        saving.end(ranks)
        choice = reader.choose([tmp_path], lambda one: None)
        assert choice is not None and choice.step >= before + 2
        assert all((tensor == choice.step).all() for tensor in load(choice.path).values()), "of one step only"
        Checkpoints(tmp_path).remove_leftovers(attempt)
        assert all(path.name.startswith("step-") for path in tmp_path.iterdir())
        before = choice.step


def _leaving(call: str) -> subprocess.Popen[str]:
    """A process of its own that makes this call of `saving`, and ends as Python ends."""
    code = f"from pathlib import Path; from runtime import saving; saving.{call}"
    variables = {**os.environ, "PYTHONPATH": f"{ROOT}:{HERE.parent}"}
    return subprocess.Popen(
        [sys.executable, "-c", code], env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.ranks(2)
def test_the_end_of_the_process_waits_for_no_save_that_hangs(tmp_path: Path) -> None:
    port = free_port()
    ranks = [_leaving(f"leave_while_stuck({rank}, {port}, Path({str(tmp_path)!r}))") for rank in range(2)]
    try:
        assert ranks[1].stdout is not None and ranks[1].stdout.readline() == "stuck\n"
        _, err = ranks[0].communicate(timeout=PATIENCE)
        assert ranks[0].returncode == 0, err
        assert "the checkpoint of step 1 was still being written" in err
        assert ranks[1].poll() is None
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@pytest.mark.ranks(1)
def test_a_save_that_is_about_to_be_done_is_done_before_the_process_ends(tmp_path: Path) -> None:
    """Else the thread returns from torch to an interpreter that has ended, which aborts the process."""
    rank = _leaving(f"leave_while_writing({free_port()}, Path({str(tmp_path)!r}))")
    try:
        _, err = rank.communicate(timeout=PATIENCE)
    finally:
        rank.kill()
    assert rank.returncode == 0 and "still being written" not in err, (
        err
    )  # torch 2.4 warns there of its own TypedStorage
    assert good(tmp_path) == [1]
