"""What the tests of asynchronous saving run on their ranks, and a way to run it where ranks are killed."""

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from slurmddp.runtime import world as worlds
from slurmddp.runtime.checkpoint import shards, state
from slurmddp.runtime.checkpoint.saving import Failed, Saved
from slurmddp.runtime.checkpoint.writer import Writer
from slurmddp.runtime.world import World
from slurmddp.shared.checkpoint import layout
from slurmddp.shared.checkpoint.checkpoints import Checkpoints

from .harness import PATIENCE, free_port, place

Tensors = dict[str, torch.Tensor]


def make(*widths: int) -> state.Trained:
    """A model with buffers, and AdamW that has made one step: the same on all ranks."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, width), nn.BatchNorm1d(width)) for width in widths or (24, 40)]
    model = nn.ModuleList(layers)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return state.Trained(model, optimizer, torch.amp.GradScaler("cpu", enabled=False))


def change(trained: state.Trained, value: float) -> None:
    """What a step does, in place: afterwards everything is `value`."""
    with torch.no_grad():
        for tensor in state.collect(trained).values():
            tensor.copy_(torch.full((), value))


def writer(root: Path, world: World, **options: Any) -> Writer:
    return Writer(root, world, **{"keep": 2, "config": "c", "rejected": [], **options})


def save_now(writer: Writer, trained: state.Trained, step: int) -> Saved:
    """Begin and finish one checkpoint."""
    writer.begin(trained, step=step, data=data(step))
    last = writer.finish()[-1]
    assert isinstance(last, Saved), last
    return last


def data(step: int) -> dict[str, Any]:
    return {"step": step, "global_batch": 4, "samples": 4 * step}


def copies(trained: state.Trained) -> Tensors:
    return {name: whole(tensor) for name, tensor in state.collect(trained).items()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def load(folder: Path) -> Tensors:
    """All tensors of a checkpoint, in one process."""
    metadata = shards.read_metadata(folder)
    tensors = {
        name: torch.empty(item.size, dtype=item.properties.dtype) for name, item in metadata.state_dict_metadata.items()
    }
    shards.read(folder, metadata, tensors)
    return tensors


def same(first: Tensors, second: Tensors) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def good(root: Path) -> list[int]:
    """Steps of all checkpoints that verify, newest first."""
    steps = []
    for step, folder in Checkpoints(root).folders():
        with contextlib.suppress(layout.Rejected):
            Checkpoints.verify(folder)
            steps.append(step)
    return steps


@contextlib.contextmanager
def gate(ranks: set[int], world: World) -> Iterator[threading.Event]:
    """On these ranks nothing is written before the event is set."""
    opened, write = threading.Event(), shards.write

    def waiting(*arguments: Any) -> Any:
        if world.rank in ranks:
            assert opened.wait(PATIENCE)
        return write(*arguments)

    with mock.patch.object(shards, "write", waiting):
        try:
            yield opened
        finally:
            opened.set()


def short(ended: list[Saved | Failed]) -> list[tuple[Any, ...]]:
    """For the test process: (step, path's name or message, older, fatal)."""
    return [
        (one.step, one.path.name) if isinstance(one, Saved) else (one.step, one.message, one.older, one.fatal)
        for one in ended
    ]


# --- ranks that may be killed: one process each, made in milliseconds from a server that has imported torch


def start(size: int, function: Callable[..., None], *arguments: Any) -> list[BaseProcess]:
    """Start `function(world, *arguments)` on ranks 0..size-1. Exit code 0: it has returned."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.checkpoint", __name__])
    port = free_port()
    ranks: list[BaseProcess] = [
        context.Process(target=_rank, args=(rank, size, port, function, arguments)) for rank in range(size)
    ]
    for process in ranks:
        process.start()
    return ranks


def end(ranks: list[BaseProcess], timeout: float = PATIENCE) -> list[int | None]:
    """Wait for all of them; their exit codes, None for one that had to be killed."""
    codes: list[int | None] = []
    limit = time.monotonic() + timeout
    for process in ranks:
        process.join(max(limit - time.monotonic(), 0.0))
        codes.append(process.exitcode)
        if process.is_alive():
            process.kill()
            process.join()
    return codes


def _rank(rank: int, size: int, port: int, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(size)}
    joined = worlds.start(place(rank, size), timeout=120)
    function(joined, *arguments)
    sys.stdout.flush()
    os._exit(0)


def save_without_end(world: World, root: Path, attempt: int, keep: int) -> None:
    """Save each step's number in all weights, until killed."""
    world = dataclasses.replace(world, attempt=attempt)
    world.on_main(lambda: Checkpoints(root).remove_leftovers(attempt))
    first = world.on_main(lambda: max(good(root), default=0))
    trained, saving = make(200, 300), writer(root, world, keep=keep)
    for step in range(first + 1, first + 10_000):
        change(trained, float(step))
        saving.begin(trained, step=step, data=data(step))
        for one in saving.poll():
            assert isinstance(one, Saved), one


def die_while_saving(world: World, root: Path, own: bool) -> None:
    """Save 1.0 everywhere, then 2.0, of which rank 1 dies: with our writer, or with DCP alone in one folder."""
    trained = make()
    change(trained, 1.0)
    _save(world, root, own, trained, 1)
    change(trained, 2.0)
    if world.rank == 1:
        kill = mock.Mock(side_effect=lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        mock.patch.object(shards, "write", kill).start()
        mock.patch("torch.distributed.checkpoint.filesystem.FileSystemWriter.write_data", kill).start()
    _save(world, root, own, trained, 2)


def _save(world: World, root: Path, own: bool, trained: state.Trained, step: int) -> None:
    if own:
        saving = writer(root, world)
        saving.begin(trained, step=step, data=data(step))
        (ended,) = saving.finish()
        assert isinstance(ended, Saved) == (step == 1), ended
        assert step == 1 or (ended.fatal and ended.older), ended
        return
    import torch.distributed.checkpoint as dcp

    with contextlib.nullcontext() if step == 1 else contextlib.suppress(RuntimeError):
        dcp.save(state.collect(trained), checkpoint_id=root)


def die_at(world: World, root: Path, action: int, save: Callable[[World, Path], None]) -> None:
    """Run `save`, and die just before its file system action of that number (from 0) below `root`."""
    count = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        changes = event in {"os.rename", "os.remove", "os.rmdir", "os.mkdir"}
        changes |= event == "open" and isinstance(arguments[1], str) and "w" in arguments[1]
        if changes and (isinstance(arguments[0], int) or str(arguments[0]).startswith(str(root))):
            if count == action:
                os._exit(9)
            count += 1

    sys.addaudithook(hook)
    save(world, root)


def save_second(world: World, root: Path) -> None:
    saving, trained = writer(root, world, keep=1), make()
    change(trained, 2.0)
    saving.begin(trained, step=2, data=data(2))
    assert short(saving.finish()) == [(2, "step-00000002")]


def save_first(world: World, root: Path) -> None:
    saving, trained = writer(root, world, keep=1), make()
    change(trained, 1.0)
    assert save_now(saving, trained, 1).step == 1


def leave_while_stuck(rank: int, port: int, root: Path) -> None:
    """Rank 1's disk hangs; rank 0 comes to the end of its program."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    world = worlds.start(place(rank, 2), timeout=120)
    if rank == 1:
        mock.patch.object(shards, "write", lambda *_: threading.Event().wait()).start()
    saving = writer(root, world)
    saving.begin(make(), step=1, data=data(1))
    if rank == 1:
        print("stuck", flush=True)
        threading.Event().wait()
    assert saving.busy
    saving.close()
    dist.destroy_process_group()


def leave_while_writing(port: int, root: Path) -> None:
    """Comes to the end of its program while its thread computes with torch, which it does in all saves."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1"}
    world = worlds.start(place(0, 1), timeout=120)
    write = shards.write

    def slowly(*arguments: Any) -> Any:
        until = time.monotonic() + 2
        while time.monotonic() < until:
            torch.ones(100).sum()
        return write(*arguments)

    mock.patch.object(shards, "write", slowly).start()
    saving = writer(root, world)
    saving.begin(make(), step=1, data=data(1))
    assert saving.busy
