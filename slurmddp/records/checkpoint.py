"""The manifest of a checkpoint: what was saved, and by which files."""

from pathlib import PurePosixPath
from typing import Any, Dict, Mapping, NamedTuple, Optional

from slurmddp.records.values import whole

VERSION = 1
#: The file that makes a checkpoint complete: the manifest's sha256, written last.
COMPLETE = "COMPLETE"


class FileFacts(NamedTuple):
    """What a manifest says of one file."""

    bytes: int
    sha256: str


class Manifest(NamedTuple):
    """What manifest.json says. files: by name, relative to the checkpoint's folder and in it."""

    step: int
    world: int  # ranks that saved it
    files: Mapping[str, FileFacts]
    mesh: Mapping[str, int] = {}  # how the parameters lie over them
    attempt: Optional[int] = None
    code: str = ""  # code, config: sha256 of the code and of the job's description
    config: str = ""
    version: str = ""  # of slurmddp
    torch: str = ""
    global_batch: Optional[int] = None

    def write(self) -> Dict[str, Any]:
        files = {name: dict(self.files[name]._asdict()) for name in sorted(self.files)}
        return dict(self._asdict(), schema=VERSION, mesh=dict(self.mesh), files=files)


def read(record: Any) -> Manifest:
    """Return what an object says. Raises ValueError with what is wrong, for people."""
    version = record.get("schema") if isinstance(record, dict) else None
    if version not in (None, VERSION):
        raise ValueError("has schema {}, and this version of slurmddp reads {}".format(version, VERSION))
    try:
        step, world = record["step"], record["world"]
        files = {name: FileFacts(item["bytes"], item["sha256"]) for name, item in record["files"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError("is not a manifest: {!r}".format(error)) from error
    numbers = [step, world] + [facts.bytes for facts in files.values()]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("is not a manifest: step, world and sizes have to be whole numbers")
    if not all(isinstance(facts.sha256, str) for facts in files.values()):
        raise ValueError("is not a manifest: its files lack hashes")
    for name in files:
        if "\0" in name or name.startswith("/") or ".." in PurePosixPath(name).parts:
            raise ValueError("names the file {!r}, which is not in the checkpoint's folder".format(name))
    mesh = record.get("mesh")
    sizes = {name: whole(size) or 0 for name, size in mesh.items()} if isinstance(mesh, dict) else {}
    code, config, by, torch = (str(record.get(key) or "") for key in ("code", "config", "version", "torch"))
    attempt, batch = whole(record.get("attempt")), whole(record.get("global_batch"))
    return Manifest(step, world, files, sizes, attempt, code, config, by, torch, batch)
