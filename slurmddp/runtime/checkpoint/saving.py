"""One save, from the copies to COMPLETE: what the writer's thread does.

All ranks write into a temporary folder, rank 0 commits it; a failure on one is known to all.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import torch

from slurmddp.runtime.checkpoint import commit, shards
from slurmddp.runtime.checkpoint.files import hashed
from slurmddp.runtime.checkpoint.staging import Staging
from slurmddp.runtime.errors import PeerError
from slurmddp.runtime.world import World
from slurmddp.shared.checkpoint import layout


@dataclass(frozen=True)
class Saved:
    """One committed checkpoint: complete, and on stable storage.

    `seconds`: from the beginning to the end. `stall`: for how many of them the steps stood still. `remark`:
    what went wrong without harm to it; mostly empty.
    """

    path: Path
    step: int
    seconds: float
    stall: float
    bytes: int
    remark: str = ""


@dataclass(frozen=True)
class Failed:
    """A save that came to nothing; what it had written is removed, and older checkpoints are as they were.

    `message` names rank and reason. `older`: whether a complete checkpoint is there. Both are the same on
    all ranks, unless `fatal`: the ranks could not even agree, so one of them is gone.
    """

    step: int
    message: str
    fatal: bool
    older: bool
    cause: Exception | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Destination:
    """What is the same for all saves of an attempt. The group of `world` is the saves' own."""

    root: Path
    world: World
    keeping: commit.Keeping
    config: str
    mesh: Mapping[str, int]


@dataclass(frozen=True)
class Task:
    """One save. `random`: states of this rank's generators. `began`: time.monotonic()."""

    step: int
    data: Mapping[str, Any]
    nonce: str
    random: Mapping[str, Any]
    plan: shards.Plan
    staging: Staging
    began: float


def save(destination: Destination, task: Task) -> Saved | Failed:
    """Write one checkpoint; every rank has to call it, and learns the same. Raises nothing. `stall` is 0."""
    folder = destination.root / layout.temporary_name("saving", task.step, destination.world.attempt, task.nonce)
    final = destination.root / layout.folder_name(task.step)
    try:
        size, remark = _write(destination, task, folder, final)
    except Exception as error:  # noqa: BLE001 - whatever it is, it must not end in silence
        return _failed(destination, task.step, folder, final, error)
    return Saved(final, task.step, time.monotonic() - task.began, 0.0, size, remark)


def _write(destination: Destination, task: Task, folder: Path, final: Path) -> tuple[int, str]:
    """Write, sync and commit. Returns bytes and a remark. A failure on any rank is raised on all."""
    world = destination.world
    rows, own = world.together(lambda: _write_own(task, folder, world.rank))
    written = world.gather((rows, {name: (facts.bytes, facts.sha256) for name, facts in own.items()}))

    def complete() -> tuple[int, str]:
        files = {name: layout.FileFacts(*facts) for _, theirs in written for name, facts in theirs.items()}
        files.update(shards.finish(folder, task.plan.metadata, [rows for rows, _ in written]))
        facts = commit.describe(task.step, world.size, destination.mesh, world.attempt, destination.config)
        size = commit.commit(folder, final, facts, files, task.data)
        return size, commit.prune(final, destination.keeping, step=task.step, attempt=world.attempt)

    size, remark = world.on_main(complete)
    return size, remark


def _write_own(task: Task, folder: Path, rank: int) -> tuple[list[shards.Row], dict[str, layout.FileFacts]]:
    """One rank's shards and random states."""
    task.staging.wait()
    (folder / layout.RNG).mkdir(parents=True, exist_ok=True)
    rows, files = shards.write(folder, rank, task.staging.parts)
    states: dict[str, layout.FileFacts] = {}
    with hashed(folder / layout.RNG / f"rank-{rank:05d}.pt", states) as stream:
        torch.save(dict(task.random), cast(IO[bytes], stream))
    return rows, {**files, **{f"{layout.RNG}/{name}": facts for name, facts in states.items()}}


def _failed(destination: Destination, step: int, folder: Path, final: Path, error: Exception) -> Failed:
    """Agree on what happened, and clear up. Where ranks do not even agree, one of them is gone."""
    world = destination.world
    own = None if isinstance(error, PeerError) else f"rank {world.rank} on {world.node}: {str(error) or repr(error)}"

    def clear_up() -> bool:
        commit.sweep(folder, final)
        return commit.older(destination.root)

    try:
        messages = [message for message in world.gather(own) if message is not None]
        older = world.on_main(clear_up)
    except Exception:  # noqa: BLE001 - the first error is the one that tells
        message = f"rank {world.rank} on {world.node} has lost the others while saving: {str(error) or repr(error)}"
        return Failed(step, message, fatal=True, older=commit.older(destination.root), cause=error)
    message = messages[0] if messages else str(error)
    if len(messages) > 1:
        message += f" ({len(messages)} of {world.size} ranks failed)"
    return Failed(step, message, fatal=False, older=older, cause=error)
