"""Saving: all ranks write into a temporary folder, rank 0 commits it."""

import hashlib
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import slurmddp
from slurmddp.runtime import randomness
from slurmddp.runtime.checkpoint import layout, shards, state
from slurmddp.runtime.world import World


@dataclass(frozen=True)
class Saved:
    """One committed checkpoint."""

    path: Path
    seconds: float
    bytes: int


class Writer:
    """Writes the checkpoints of one attempt.

    `root`: the folder of checkpoints. `config`: hash of the job's description. `rejected`: checkpoints that
    loading refused, which must not push good ones out.
    """

    def __init__(self, root: Path, world: World, *, keep: int, config: str, rejected: list[Path]) -> None:
        self._root = root
        self._world = world
        self._keep = keep
        self._config = config
        self._rejected = rejected

    def save(self, trained: state.Trained, *, step: int, data: Mapping[str, Any]) -> Saved:
        """Write the checkpoint of `step`; every rank has to call it. `data`: the content of data.json.

        On return it is complete, on stable storage, and old ones are pruned. Any failure is raised on every
        rank, and leaves the earlier checkpoints as they were.
        """
        began = time.monotonic()
        world = self._world
        nonce = world.broadcast(secrets.token_hex(4) if world.is_main else None)
        folder = self._root / layout.temporary_name("saving", step, world.attempt, nonce)
        world.on_main(lambda: (folder / layout.RNG).mkdir(parents=True))
        shards.write(folder, world.together(lambda: state.collect(trained)), world)
        files: dict[str, layout.FileFacts] = {}
        for part in world.gather(world.together(lambda: self._own_files(folder))):
            files.update(part)
        path = world.on_main(lambda: self._commit(folder, files, step=step, data=data, nonce=nonce))
        return Saved(path, time.monotonic() - began, sum(item.bytes for item in files.values()))

    def _own_files(self, folder: Path) -> dict[str, layout.FileFacts]:
        """Write this rank's random states; sync and hash all files that this rank has written."""
        rank = self._world.rank
        states = folder / layout.RNG / f"rank-{rank:05d}.pt"
        torch.save(randomness.states(self._world.device), states)
        own = [states, *sorted(folder.glob(f"__{rank}_*"))]
        if self._world.is_main:
            own.append(folder / ".metadata")
        return {path.relative_to(folder).as_posix(): layout.facts(path, sync=True) for path in own}

    def _commit(
        self,
        folder: Path,
        files: Mapping[str, layout.FileFacts],
        *,
        step: int,
        data: Mapping[str, Any],
        nonce: str,
    ) -> Path:
        """On rank 0: manifest, rename, COMPLETE, prune; in this order."""
        attempt = self._world.attempt
        layout.write_json(folder / layout.DATA, data)
        listed = {**files, layout.DATA: layout.facts(folder / layout.DATA)}
        layout.write_json(
            folder / layout.MANIFEST,
            {
                "schema": layout.SCHEMA,
                "step": step,
                "world": self._world.size,
                "mesh": {"replicate": self._world.size},
                "global_batch": data["global_batch"],
                "attempt": attempt,
                "code": code_hash(),
                "config": self._config,
                "version": slurmddp.__version__,
                "torch": torch.__version__,
                "files": {name: asdict(listed[name]) for name in sorted(listed)},
            },
        )
        layout.sync_folder(folder / layout.RNG)
        layout.sync_folder(folder)
        final = self._root / layout.folder_name(step)
        if final.exists():
            # Unfinished, or refused when this attempt loaded: a good one would have been loaded, and its
            # step not redone.
            layout.discard(final, attempt=attempt, nonce=secrets.token_hex(4))
        folder.rename(final)
        layout.sync_folder(self._root)
        layout.mark_complete(final)
        if final in self._rejected:
            self._rejected.remove(final)
        layout.prune(self._root, keep=self._keep, committed=step, rejected=self._rejected, attempt=attempt, nonce=nonce)
        return final


def code_hash() -> str:
    """sha256 over the runtime's own source files: which code wrote a checkpoint."""
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
