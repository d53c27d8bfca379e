"""The folder of a sweep: sweep.json with its points, each point's resolved job, and the runs of the points."""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from slurmddp.errors import UserError
from slurmddp.run import index
from slurmddp.run.create import folder_error, make_folder, write_file
from slurmddp.run.gate import Held, hold
from slurmddp.run.index import Entry
from slurmddp.run.layout import RunFolder
from slurmddp.shared.files import read_json

SCHEMA = 1
_FILE = "sweep.json"
_SHOWN = 5


@dataclass(frozen=True)
class Sweep:
    """A set of runs. points: the run name of each point, and the values that the point sets, by key."""

    folder: Path
    points: Mapping[str, Mapping[str, str]]
    at_most: int | None = None

    @property
    def id(self) -> str:
        return self.folder.name

    @property
    def keys(self) -> list[str]:
        """All keys that a point sets, in their first order."""
        return list(dict.fromkeys(key for values in self.points.values() for key in values))

    def job_yaml(self, name: str) -> Path:
        """The resolved job of a point, from which a point that has no run yet is submitted."""
        return self.folder / "points" / f"{name}.yaml"

    def newest_runs(self) -> dict[str, Entry]:
        """Return the newest run of each point that has one, by the point's name."""
        folders = sorted(self.folder.glob("[!.]*"))
        found = [entry for path in folders if RunFolder(path).exists and (entry := index.entry_of(RunFolder(path)))]
        return {entry.name: entry for entry in sorted(found, key=lambda entry: entry.when) if entry.name in self.points}


@dataclass(frozen=True)
class OwnSweep(Sweep):
    """A sweep of this user, in whose folder nobody else can write. Only `own` makes one."""

    held: Held | None = None

    def job_yaml(self, name: str) -> Path:
        """The resolved job of a point. Raises UserError if it is not a file of this user."""
        path = super().job_yaml(name)
        try:
            assert self.held is not None
            self.held.read(path, 1)
        except OSError as error:
            todo = "submit the sweep again"
            raise UserError(f"cannot be used: {error.strerror}", where=str(path), todo=todo) from None
        return path


def own(sweep: Sweep) -> OwnSweep:
    """Return a sweep as one of this user. Raises UserError if others could have written what it would submit."""
    todo = "submit a sweep of your own: slurmddp sweep JOB.yaml"
    held = hold(sweep.folder, f"sweep {sweep.id}", todo=todo)
    return OwnSweep(sweep.folder, sweep.points, sweep.at_most, held)


def write(sweep: Sweep, jobs: Mapping[str, str], mode: int) -> None:
    """Make the folder of a new sweep. jobs: the text of each point's job.yaml, by its name. Raises UserError."""
    facts = {
        "schema": SCHEMA,
        "sweep": sweep.id,
        "at_most": sweep.at_most,
        "points": [{"name": name, "values": dict(values)} for name, values in sweep.points.items()],
    }
    try:
        make_folder(sweep.folder.parent)
        sweep.folder.mkdir(mode)
        make_folder(sweep.folder / "points")
        for name, text in jobs.items():
            write_file(sweep.job_yaml(name), text.encode("utf-8", errors="surrogateescape"))
        text = json.dumps(facts, indent=2, ensure_ascii=False) + "\n"
        write_file(sweep.folder / _FILE, text.encode("utf-8", errors="surrogateescape"))
    except OSError as error:
        raise folder_error(error, sweep.folder) from error


def read(folder: Path) -> Sweep:
    """Read the sweep of a folder. Raises UserError."""
    path = folder / _FILE
    try:
        facts = read_json(path, folder)
        points = {str(each["name"]): {str(k): str(v) for k, v in each["values"].items()} for each in facts["points"]}
        at_most = facts["at_most"]
        schema = int(facts["schema"])
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=str(path)) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"is damaged ({type(error).__name__}: {error})", where=str(path)) from None
    if schema != SCHEMA:
        raise UserError("was written by another version of slurmddp", where=str(path), todo="use that version")
    return Sweep(folder, points, at_most if isinstance(at_most, int) else None)


def find(text: str, known: Iterable[Entry]) -> Sweep:
    """Return the sweep that `text` names: `last`, its id or the beginning of it, or its folder. Raises UserError.

    known: the runs of the index, newest first.
    """
    path = Path(os.path.abspath(os.path.expanduser(text)))
    if "/" in text or (path / _FILE).is_file():
        return read(path)
    folders = [folder for folder in dict.fromkeys(entry.folder.path.parent for entry in known) if is_sweep(folder)]
    named = folders[:1] if text == index.LAST else [folder for folder in folders if folder.name == text]
    found = named or [folder for folder in folders if text and folder.name.startswith(text)]
    if len(found) == 1:
        return read(found[0])
    listed = ", ".join(folder.name for folder in (found or folders)[:_SHOWN]) or "none"
    if found:
        raise UserError(f"{text!r} matches {len(found)} sweeps: {listed}", todo="use more characters of the id")
    raise UserError(f"no sweep {text!r}; the newest: {listed}", todo="use the id, or the folder of the sweep")


def is_sweep(folder: Path) -> bool:
    return os.path.isfile(folder / _FILE)
