"""Checkpoints for tests without torch: the files are any bytes, the manifest and COMPLETE are real."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from pathlib import Path

from slurmddp.records.checkpoint import Manifest
from slurmddp.run.layout import RunFolder
from slurmddp.shared.checkpoint import layout

#: A pickle of DCP's Metadata without tensors, as torch writes it but for its length.
NO_TENSORS = (
    b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81"
    b"}(X\x13\0\0\0state_dict_metadata}X\x0c\0\0\0storage_data}ub."
)


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
    with zipfile.ZipFile(folder / layout.RNG / "rank-00000.pt", "w") as archive:  # as torch.save({}) writes it
        archive.writestr("archive/data.pkl", pickle.dumps({}))
    (folder / ".metadata").write_bytes(NO_TENSORS)
    layout.write_json(folder / layout.DATA, {"step": step})
    names = ["__0_0.distcp", f"{layout.RNG}/rank-00000.pt", layout.DATA, ".metadata"]
    files = {name: layout.facts(folder / name) for name in names}
    layout.write_json(folder / layout.MANIFEST, Manifest(step, 2, files).write())
    layout.mark_complete(folder)
    return folder


def replace(folder: Path, name: str, content: bytes) -> None:
    """Put another file into a checkpoint, and vouch for it, as somebody would who means harm."""
    (folder / name).write_bytes(content)
    manifest = json.loads((folder / layout.MANIFEST).read_text())
    manifest["files"][name] = layout.facts(folder / name)._asdict()
    layout.write_json(folder / layout.MANIFEST, manifest)
    layout.mark_complete(folder)


class Touch:
    """Its pickle makes a file wherever it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch '{self.path}'",)


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
