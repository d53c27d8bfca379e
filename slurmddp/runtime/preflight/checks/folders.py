"""The folders that the ranks read and write, as this node sees them by itself."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slurmddp.records.preflight import Finding, bad
from slurmddp.runtime.preflight.node_settings import NodeSettings
from slurmddp.shared.run_folder import RunFolder

_BIND = "check that it is mounted on this node and bound into the container (container.binds)"


def check(settings: NodeSettings) -> Iterator[Finding]:
    """Dataset and weights to begin with, where a bundled task names them; the node's own folder."""
    for key, path in inputs(RunFolder(settings.run).job_json):
        yield from readable(key, Path(path))
    if settings.scratch and not os.access(settings.scratch, os.W_OK | os.X_OK):
        unwritable = f"cannot write to its own folder {settings.scratch} (paths.node)"
        yield bad(unwritable, "set paths.node to another folder")


def train_section(job: Path) -> dict[str, Any]:
    """Return what job.json says of the training; nothing for a script of the user's own."""
    try:
        found: dict[str, Any] = json.loads(job.read_text(encoding="utf-8"))["train"]
    except FileNotFoundError:
        return {}
    return found


def inputs(job: Path) -> list[tuple[str, str]]:
    """Return (key of the job, path) of what the ranks will read. Empty for a script of the user's own."""
    train = train_section(job)
    path = (train.get("data") or {}).get("path")
    listed = path if isinstance(path, list) else [path]
    named = [("train.data.path", item) for item in listed]
    named.append(("train.init_from", train.get("init_from")))
    return [(key, item) for key, item in named if isinstance(item, str) and os.path.isabs(item)]


def readable(key: str, path: Path) -> Iterator[Finding]:
    """Something is really read: a stale mount still shows its name."""
    try:
        if path.is_dir():
            with os.scandir(path) as entries:
                if next(entries, None) is None:
                    yield bad(f"{key}: {path} is empty", _BIND)
            if not os.access(path, os.X_OK):
                yield bad(f"{key}: no permission to enter {path}", "chmod +x it, or ask its owner")
        else:
            with path.open("rb") as file:
                file.read(1)
    except OSError as error:
        yield bad(f"{key}: cannot read {path}: {error.strerror or error}", _BIND)
