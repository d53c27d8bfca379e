"""manifest.json: what a run was made from, so that it can be understood, compared and made again."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from slurmddp.errors import UserError
from slurmddp.records import metrics
from slurmddp.run import git
from slurmddp.run.create import write_file
from slurmddp.run.gate import owner_name
from slurmddp.run.layout import RunFolder
from slurmddp.run.version import version
from slurmddp.shared import schemas
from slurmddp.shared.files import read_json

SCHEMA = 1
#: Versions of the run folder's other files that programs read.
SCHEMAS = {"job.json": schemas.JOB, "events.jsonl": schemas.EVENTS, "metrics.jsonl": metrics.VERSION}
_HASH_BELOW = 2**30  # bytes: below a GiB a hash takes a second or two, a large image would take a minute


def build(
    folder: RunFolder,
    *,
    name: str,
    command: Sequence[str],
    project: Path | None,
    code_hash: str | None,
    image: Path | None,
    resumed_from: Sequence[str] = (),
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return what goes into manifest.json.

    folder is the run's final path, command the words of slurmddp's own command line, project the user's
    folder or script (for git; None where there is none), image a file or a sandbox folder on this machine,
    resumed_from the ids or paths of the runs whose checkpoints this one starts from, more whatever else a
    caller records. Never fails for what it cannot find out: it stands in a `note` beside a null.
    """
    facts: dict[str, Any] = {
        "schema": SCHEMA,
        "schemas": SCHEMAS,
        "run": folder.id,
        "name": name,
        "created": datetime.now().astimezone().isoformat(timespec="seconds"),
        "slurmddp": version(),
        "python": platform.python_version(),
        "host": platform.node(),
        "user": owner_name(os.getuid()),
        "command": list(command),
        "directory": _directory(),
        "git": git_facts(project) if project else None,
        "code_hash": code_hash,
        "image": image_facts(image) if image else None,
        "resumed_from": list(resumed_from),
    }
    return {**facts, **(more or {})}


def write(folder: RunFolder, facts: Mapping[str, Any]) -> None:
    """Write manifest.json into a folder (a draft's) that has none. Raises OSError."""
    text = json.dumps(facts, indent=2, ensure_ascii=False) + "\n"
    # surrogateescape: paths that are not UTF-8 are written as the bytes that they are.
    write_file(folder.manifest, text.encode("utf-8", errors="surrogateescape"))


def read(folder: RunFolder) -> dict[str, Any]:
    """manifest.json as it was written.

    Raises UserError where it is absent, damaged or of another version.
    """
    facts = read_any(folder)
    if other := _other_version(facts):
        raise _refusal(folder, other)
    return facts


def read_any(folder: RunFolder) -> dict[str, Any]:
    """manifest.json of whichever version. Raises UserError where it is absent or damaged."""
    try:
        facts = read_json(folder.manifest, folder.path)
    except (OSError, ValueError) as error:
        todo = "check that this is a run folder"
        raise UserError(f"the manifest cannot be read: {error}", where=str(folder.manifest), todo=todo) from error
    if not isinstance(facts, dict) or not isinstance(facts.get("schema"), int):
        raise UserError("this file is not a slurmddp manifest", where=str(folder.manifest))
    return facts


def other_version(folder: RunFolder) -> str | None:
    """Return which version made the run, if it is not this one. None for a manifest that cannot be read, too."""
    try:
        return _other_version(read_any(folder))
    except UserError:
        return None


def require_version(folder: RunFolder, more: str = "") -> None:
    """Raise UserError for a run folder of another version. A manifest that cannot be read is not refused here.

    more: a sentence about the run, for the message.
    """
    if other := other_version(folder):
        raise _refusal(folder, other, more)


def _other_version(facts: Mapping[str, Any]) -> str | None:
    named = facts.get("schemas")
    found = {"manifest.json": facts.get("schema"), **(named if isinstance(named, dict) else {})}
    for name, number in {"manifest.json": SCHEMA, **SCHEMAS}.items():
        if isinstance(found.get(name), int) and found[name] != number:  # what is missing says nothing
            return (
                f"made by slurmddp {facts.get('slurmddp')}: its {name} has version {found[name]}, and this slurmddp "
                f"({version()}) reads only version {number}"
            )
    return None


def _refusal(folder: RunFolder, other: str, more: str = "") -> UserError:
    todo = (
        f"use the slurmddp that made it, or read its logs in {folder.logs}. `slurmddp cancel {folder.id}` works. "
        f"To submit its job again: slurmddp submit {folder.job_yaml}"
    )
    return UserError(f"{other}{f'. {more}' if more else ''}", where=str(folder.manifest), todo=todo)


def git_facts(project: Path) -> dict[str, Any] | None:
    """Return {commit, dirty, root} of the project's repository, None if there is none; a note if git fails."""
    folder = project if project.is_dir() else project.parent
    try:
        state = git.state(folder)
    except git.GitError as error:
        return {"commit": None, "dirty": None, "root": None, "note": str(error)}
    return asdict(state) if state else None


def image_facts(image: Path) -> dict[str, Any]:
    """Return {path, kind, bytes, mtime, sif_id, sha256} of an image; what is not known is null, `note` says why.

    kind is sif, folder (a sandbox) or file; mtime is in seconds since 1970; sha256 comes from IMAGE.lock.json
    beside it where that was written for just this file, else it is computed for files below 1 GiB.
    """
    from slurmddp.images.base import sif_id  # here: only submissions need them
    from slurmddp.images.provenance import read_lock, sha256

    facts: dict[str, Any] = {"path": str(image), "kind": None, "bytes": None, "mtime": None}
    facts |= {"sif_id": None, "sha256": None}
    try:
        if image.is_dir():
            return facts | {"kind": "folder", "note": "a sandbox folder has no hash"}
        found = image.stat()
        facts |= {"kind": "file", "bytes": found.st_size, "mtime": found.st_mtime}
        facts["sif_id"] = sif_id(image)
        if facts["sif_id"]:
            facts["kind"] = "sif"
        # Of another file's lock, nothing is known: the hash is then computed, or null
        facts["sha256"] = (read_lock(image) or {}).get("sha256")
        if facts["sha256"] is None and found.st_size < _HASH_BELOW:
            facts["sha256"] = sha256(image)
    except OSError as error:
        return facts | {"note": f"the image cannot be read: {error.strerror}"}
    if facts["sha256"] is None:
        facts["note"] = "not hashed: 1 GiB or more, and no matching lock file next to it"
    return facts


def _directory() -> str | None:
    try:
        return str(Path.cwd())
    except OSError:
        return None  # removed beneath us: the run needs it for nothing
