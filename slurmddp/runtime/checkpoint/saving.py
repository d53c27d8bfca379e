"""One save, from the copies to COMPLETE: what the writer's thread does.

All ranks write into a temporary folder; rank 0 commits it and removes old ones; a failure on one is known to all.
"""

import functools
import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch

import slurmddp
from slurmddp.records.checkpoint import FileFacts, Manifest
from slurmddp.runtime.checkpoint import shards
from slurmddp.runtime.checkpoint.files import hashed
from slurmddp.runtime.checkpoint.staging import Staging
from slurmddp.runtime.errors import PeerError
from slurmddp.runtime.world import World
from slurmddp.shared.checkpoint import layout
from slurmddp.shared.checkpoint.checkpoints import Checkpoints


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


@dataclass(frozen=True)
class Destination:
    """What is the same for all saves of an attempt. The group of `world` is the saves' own.

    `keep`, `keep_every`, `rejected`: see Checkpoints.prune.
    """

    checkpoints: Checkpoints
    world: World
    keep: int
    keep_every: int | None
    rejected: list[Path]
    config: str
    mesh: Mapping[str, int]


@dataclass(frozen=True)
class Task:
    """One save. `random`: states of this rank's generators. `scheduler`: a file. `began`: time.monotonic()."""

    step: int
    data: Mapping[str, Any]
    nonce: str
    random: Mapping[str, Any]
    scheduler: bytes
    plan: shards.Plan
    staging: Staging
    began: float


def save(destination: Destination, task: Task) -> Saved | Failed:
    """Write one checkpoint; every rank has to call it, and learns the same. Raises nothing. `stall` is 0."""
    root = destination.checkpoints.root
    folder = root / layout.temporary_name("saving", task.step, destination.world.attempt, task.nonce)
    try:
        size, remark = _write(destination, task, folder)
    except Exception as error:  # noqa: BLE001 - whatever it is, it must not end in silence
        return _failed(destination, task.step, folder, error)
    return Saved(root / layout.folder_name(task.step), task.step, time.monotonic() - task.began, 0.0, size, remark)


def _write(destination: Destination, task: Task, folder: Path) -> tuple[int, str]:
    """Write, sync and commit. Returns bytes and a remark. A failure on any rank is raised on all."""
    world = destination.world
    rows, own = world.together(lambda: _write_own(task, folder, world.rank))
    written = world.gather((rows, {name: (facts.bytes, facts.sha256) for name, facts in own.items()}))

    def complete() -> tuple[int, str]:
        files = {name: FileFacts(*facts) for _, theirs in written for name, facts in theirs.items()}
        files.update(shards.finish(folder, task.plan.metadata, [rows for rows, _ in written]))
        manifest = destination.checkpoints.save(folder, _manifest(destination, task, files), task.data)
        return sum(item.bytes for item in manifest.files.values()), _prune(destination, task.step)

    size, remark = world.on_main(complete)
    return size, remark


def _write_own(task: Task, folder: Path, rank: int) -> tuple[list[shards.Row], dict[str, FileFacts]]:
    task.staging.wait()
    (folder / layout.RNG).mkdir(parents=True, exist_ok=True)
    rows, files = shards.write(folder, rank, task.staging.parts)
    if task.scheduler and rank == 0:
        with hashed(folder / layout.SCHEDULER, files) as stream:
            stream.write(task.scheduler)
    states: dict[str, FileFacts] = {}
    with hashed(folder / layout.RNG / f"rank-{rank:05d}.pt", states) as stream:
        torch.save(dict(task.random), cast(IO[bytes], stream))
    return rows, {**files, **{f"{layout.RNG}/{name}": facts for name, facts in states.items()}}


def _manifest(destination: Destination, task: Task, files: Mapping[str, FileFacts]) -> Manifest:
    world = destination.world
    return Manifest(
        step=task.step,
        world=world.size,
        files=files,
        mesh=destination.mesh,
        attempt=world.attempt,
        code=code_hash(),
        config=destination.config,
        version=slurmddp.__version__,
        torch=str(torch.__version__),
        global_batch=task.data["global_batch"],
    )


def _prune(destination: Destination, step: int) -> str:
    """Remove what need not be kept beside the checkpoint of `step`, on rank 0. Return a remark if that failed."""
    checkpoints, rejected = destination.checkpoints, destination.rejected
    rejected[:] = [path for path in rejected if path != checkpoints.root / layout.folder_name(step)]
    try:
        checkpoints.prune(
            keep=destination.keep,
            keep_every=destination.keep_every,
            committed=step,
            rejected=rejected,
            attempt=destination.world.attempt,
        )
    except OSError as error:
        return f"old checkpoints could not be removed: {error}"
    return ""


@functools.cache
def code_hash() -> str:
    """sha256 over the runtime's own source files: which code wrote a checkpoint."""
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _failed(destination: Destination, step: int, folder: Path, error: Exception) -> Failed:
    """Agree on what happened, and clear up. Where ranks do not even agree, one of them is gone."""
    world, checkpoints = destination.world, destination.checkpoints
    own = None if isinstance(error, PeerError) else f"rank {world.rank} on {world.node}: {str(error) or repr(error)}"

    def clear_up() -> bool:
        checkpoints.abandon(folder, step)
        return checkpoints.any_complete

    try:
        messages = [message for message in world.gather(own) if message is not None]
        older = world.on_main(clear_up)
    except Exception:  # noqa: BLE001 - the first error is the one that tells
        message = f"rank {world.rank} on {world.node} has lost the others while saving: {str(error) or repr(error)}"
        return Failed(step, message, fatal=True, older=checkpoints.any_complete)
    message = messages[0] if messages else str(error)
    if len(messages) > 1:
        message += f" ({len(messages)} of {world.size} ranks failed)"
    return Failed(step, message, fatal=False, older=older)
