"""Checkpoints for tests without torch: the files are any bytes, the manifest and COMPLETE are real."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from slurmddp.runs.layout import RunFolder
from slurmddp.runtime.checkpoint import layout


def make_run(path: Path, *steps: int, job: dict[str, object] | None = None) -> RunFolder:
    """A run folder of a bundled task with complete checkpoints."""
    folder = RunFolder(path)
    path.mkdir(parents=True)
    facts = {"schema": 1, "run": path.name, "name": "gpt", "created": "2026-01-01T00:00:00+00:00"}
    folder.manifest.write_text(json.dumps(facts))
    folder.job_json.write_text(json.dumps({"resume_from": [], **(job or {})}))
    for step in steps:
        make_checkpoint(folder.checkpoints, step)
    return folder


def make_checkpoint(root: Path, step: int, *, size: int = 1000) -> Path:
    """A complete checkpoint with a shard of `size` bytes."""
    folder = root / layout.folder_name(step)
    (folder / layout.RNG).mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(bytes([step % 256]) * size)
    (folder / layout.RNG / "rank-00000.pt").write_bytes(b"random")
    layout.write_json(folder / layout.DATA, {"step": step})
    names = ["__0_0.distcp", f"{layout.RNG}/rank-00000.pt", layout.DATA]
    files = {name: asdict(layout.facts(folder / name)) for name in names}
    layout.write_json(folder / layout.MANIFEST, {"schema": layout.SCHEMA, "step": step, "world": 2, "files": files})
    layout.mark_complete(folder)
    return folder


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
