"""Rank 0's part of a save: the folder's description, its name, COMPLETE, and the old ones."""

import functools
import hashlib
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import slurmddp
from slurmddp.shared.checkpoint import layout


@dataclass
class Keeping:
    """Which checkpoints stay: the newest `keep`, and each whose step is a multiple of `every`.

    `rejected`: those that loading refused, which must not push good ones out.
    """

    keep: int
    every: int | None
    rejected: list[Path] = field(default_factory=list)


def commit(
    folder: Path, final: Path, facts: Mapping[str, Any], files: Mapping[str, layout.FileFacts], data: Mapping[str, Any]
) -> int:
    """Turn the finished `folder` into the checkpoint `final`; returns its bytes without the manifest.

    `facts`: from `describe`. `data`: the content of data.json.
    """
    layout.write_json(folder / layout.DATA, data)
    listed = {**files, layout.DATA: layout.facts(folder / layout.DATA)}
    described = {name: asdict(listed[name]) for name in sorted(listed)}
    content = {**facts, "global_batch": data["global_batch"], "files": described}
    layout.write_json(folder / layout.MANIFEST, content)
    layout.sync_folder(folder / layout.RNG)
    layout.sync_folder(folder)
    if final.exists():
        # Unfinished, or refused when this attempt loaded: a good one would have been loaded, and its step
        # not redone.
        layout.discard(final, attempt=facts["attempt"], nonce=secrets.token_hex(4))
    folder.rename(final)
    layout.sync_folder(final.parent)
    layout.mark_complete(final)
    return sum(item.bytes for item in listed.values())


def prune(final: Path, keeping: Keeping, *, step: int, attempt: int) -> str:
    """Remove what `keeping` does not keep, now that `final` is there; returns a remark where that failed."""
    if final in keeping.rejected:
        keeping.rejected.remove(final)
    try:
        layout.prune(
            final.parent,
            keep=keeping.keep,
            keep_every=keeping.every,
            committed=step,
            rejected=keeping.rejected,
            attempt=attempt,
            nonce=secrets.token_hex(4),
        )
    except OSError as error:
        return f"old checkpoints could not be removed: {error}"
    return ""


def sweep(folder: Path, final: Path) -> None:
    """Remove what a failed save has left, as far as that is possible. Older checkpoints stay as they are."""
    shutil.rmtree(folder, ignore_errors=True)
    if final.is_dir() and not layout.is_complete(final):
        shutil.rmtree(final, ignore_errors=True)


def older(root: Path) -> bool:
    """Whether a complete checkpoint is there."""
    try:
        return any(layout.is_complete(folder) for _, folder in layout.found(root))
    except OSError:
        return False


def describe(step: int, world: int, mesh: Mapping[str, int], attempt: int, config: str) -> dict[str, Any]:
    """What a manifest says beside its files and the global batch."""
    return {
        "schema": layout.SCHEMA,
        "step": step,
        "world": world,
        "mesh": dict(mesh),
        "attempt": attempt,
        "code": code_hash(),
        "config": config,
        "version": slurmddp.__version__,
        "torch": str(torch.__version__),
    }


@functools.cache
def code_hash() -> str:
    """sha256 over the runtime's own source files: which code wrote a checkpoint."""
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
