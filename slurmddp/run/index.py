"""Finds runs on any file system, through a small index in the user's state folder that may be lost."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path
from typing import Any

from slurmddp.errors import UserError
from slurmddp.records.rehearsal import REQUEST
from slurmddp.run import events, manifest, submission
from slurmddp.run.layout import RunFolder

LAST = "last"
_ASK = "ask its owner for access, or use a machine that mounts this file system"
_SHOWN = 10  # candidates and near misses in a message
_DEPTH = 3  # folders below a root where runs are looked for
_LOOKED_AT = 20_000  # folder entries: a root such as / must not be searched for minutes


@dataclass(frozen=True)
class Entry:
    """One run as the index knows it. created: ISO 8601 with zone; site, job_id and directory, from which it was
    submitted, may be unknown ("")."""

    id: str
    path: str
    created: str
    name: str
    site: str = ""
    job_id: str = ""
    directory: str = ""

    @property
    def folder(self) -> RunFolder:
        return RunFolder(Path(self.path))

    @property
    def is_own(self) -> bool:
        """Return whether the run is there and this user's: the index takes no other, so that nobody else can be
        `last`."""
        try:
            return self.folder.exists and os.stat(self.path).st_uid == os.geteuid()
        except OSError:
            return False

    def is_of(self, here: str) -> bool:
        """Return whether the run was submitted from this folder or one above it (the home folder counts for itself
        alone), or lies below it. What is not known is not taken for yes."""
        above = self.directory if self.directory not in ("/", os.path.realpath(os.path.expanduser("~"))) else ""
        if here == self.directory or (above and here.startswith(f"{above}/")):
            return True
        path = os.path.realpath(self.path)
        return path == here or path.startswith(f"{here.rstrip('/')}/") or here.startswith(f"{path}/")

    @property
    def when(self) -> datetime:
        """`created` as a time that compares across zones."""
        try:
            found = datetime.fromisoformat(self.created)
        except ValueError:
            return datetime.min.replace(tzinfo=timezone.utc)  # written by no version of ours: it sorts last
        return found if found.tzinfo else found.astimezone()


def state_folder() -> Path:
    """Return `${XDG_STATE_HOME:-~/.local/state}/slurmddp` (XDG Base Directory Specification)."""
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".local" / "state") / "slurmddp"


def index_file() -> Path:
    """Return where the index is: JSON lines, append only."""
    return state_folder() / "runs.jsonl"


def record(entry: Entry) -> str | None:
    """Add a run, or newer facts about one; the newest line of an id counts.

    Returns None, or a warning for the user: a home that is full or read-only must not fail a submission.
    """
    try:
        index_file().parent.mkdir(parents=True, exist_ok=True)
        events.append_line(index_file(), asdict(entry))
    except (OSError, RuntimeError) as error:  # RuntimeError: Path.home() of a user without one
        return f"cannot add the run to the index ({error}); use its folder instead of its id: {entry.path}"
    return None


def entries() -> list[Entry]:
    """Return all runs in the index whose folder is still there, newest first. Damaged lines are left out."""
    return [entry for entry in _read() if entry.is_own]


def of_name(name: str, count: int) -> list[Entry]:
    """Return the newest runs of a name whose folders are still there, newest first."""
    return list(islice((entry for entry in _read() if entry.name == name and entry.is_own), count))


def newest(site: str, count: int) -> list[Entry]:
    """Return the newest runs of a site, newest first, whether their folders are still there or not. Submissions that
    were refused are none.
    """
    runs = (entry for entry in _read() if entry.site == site and (entry.job_id or os.path.isdir(entry.path)))
    return list(islice(runs, count))


def rebuild(roots: Iterable[Path]) -> list[Entry]:
    """Look for this user's runs at and below `roots` and add to the index those that it lacks, or has elsewhere.

    Returns all that was found, newest first. Lines are only ever added, so a submission at the same moment
    loses none.
    """
    return [entry for entry in _searched(roots) if entry.is_own]


def _searched(roots: Iterable[Path]) -> list[Entry]:
    """Return the runs at and below `roots`, also those of other users; only this user's go into the index."""
    known = {entry.id: entry for entry in _read()}
    found: dict[str, Entry] = {}
    for root in roots:
        for folder in _run_folders(root):
            if (folder.path / REQUEST).exists():
                continue  # of a rehearsal, which has killed it: nobody wants it as `last`
            if (entry := entry_of(folder)) is None or (entry.id in found and not entry.is_own):
                continue
            found[entry.id] = entry
            old = known.get(entry.id)
            if entry.is_own and (old is None or (old.path != entry.path and not old.folder.exists)):
                record(entry)  # without an index the runs are still found, each time anew
    return _newest_first(found.values())


def entry_of(folder: RunFolder) -> Entry | None:
    """Return what the index should say of a run folder, from its own files; None if it is none of ours."""
    try:
        facts = manifest.read_any(folder)
    except UserError:
        return None  # somebody else's folder with a manifest.json
    try:
        sent = submission.read(folder)
    except (UserError, OSError):
        sent = None  # the run is found all the same; `status` shows the error
    return Entry(
        id=str(facts.get("run") or folder.id),
        path=str(folder.path),
        created=str(facts.get("created", "")),
        name=str(facts.get("name", "")),
        site=str(facts.get("site") or ""),
        job_id=sent.job_id if sent else "",
        directory=str(facts.get("directory") or ""),
    )


def find(text: str, roots: Sequence[Path] = ()) -> RunFolder:
    """Return the run that `text` names: a folder, a run id, a job id, or the beginning of one run id only; `last` is
    the newest of this folder, else the newest of all.

    Looked for in the index, then below `roots`. Raises UserError: several runs (they are listed), one whose
    folder is gone or closed to us (its job is named), or none (the nearest ids are).
    """
    known = _read()
    if folder := _as_folder(text, known):
        return folder
    found = _matches(text, known)
    if not found:
        known = _newest_first({entry.id: entry for entry in (*known, *_searched(roots))}.values())
        found = _matches(text, known)
    if len(found) == 1:
        return found[0].folder
    if found:
        raise UserError(
            f"{text!r} matches {len(found)} runs:\n" + "\n".join(_line(entry) for entry in found[:_SHOWN]),
            todo="use more characters of the id, or the run folder",
        )
    if lost := [entry for entry in known if _is_named(entry, text)]:
        raise _lost(lost)
    raise UserError(_none(text, [entry for entry in known if entry.folder.exists], roots))


def _matches(text: str, known: Sequence[Entry]) -> list[Entry]:
    """Existing runs that `text` names, by the first rule that finds any.

    Only candidates are looked up on disk.
    """
    if text == LAST:
        here = _here()
        of_here = (entry for entry in known if here and entry.is_of(here) and entry.is_own)
        newest_run = next(of_here, None) or next((entry for entry in known if entry.is_own), None)
        return [newest_run] if newest_run else []
    if not text:
        return []
    rules: tuple[Callable[[Entry], bool], ...] = (
        lambda entry: entry.id == text,
        lambda entry: _is_named(entry, text),
        lambda entry: entry.id.startswith(text),
    )
    for rule in rules:
        named = [entry for entry in known if rule(entry)]
        if found := [entry for entry in named if entry.folder.exists]:
            return found
        if any(_is_named(entry, text) for entry in named):
            return []  # a whole id of a run whose folder is gone must not become another run's beginning
    return []


def is_here(folder: RunFolder) -> bool:
    """Return whether a run is one of the current folder, as `last` takes it."""
    here, entry = _here(), entry_of(folder)
    return bool(here) and entry is not None and entry.is_of(here)


def _here() -> str:
    """The current folder; "" where it is gone."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def _is_named(entry: Entry, text: str) -> bool:
    """Return whether this is the run's whole id, or its job's."""
    return bool(text) and text in (entry.id, entry.job_id, entry.job_id.split(";")[0])


def _as_folder(text: str, known: Sequence[Entry]) -> RunFolder | None:
    """The run folder that `text` is the path of. Raises UserError for a path to something else."""
    expanded = os.path.expanduser(text)
    path = Path(os.path.abspath(expanded))
    folder = RunFolder(path)
    if text and folder.exists:
        return folder
    if "/" in text:
        if lost := [entry for entry in known if entry.path == str(path)]:
            raise _lost(lost)
        if closed := _closed(folder):
            raise UserError(f"{path} cannot be read: {closed}", todo=_ASK)
        what = "is not a run folder (no manifest.json)" if os.path.exists(path) else "does not exist"
        raise UserError(f"{path} {what}", todo="`slurmddp runs` lists the runs")
    return None


def _closed(folder: RunFolder) -> str | None:
    """Why one cannot tell whether a run is there (no permission, a server that is away), None if one can."""
    try:
        folder.manifest.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return error.strerror or str(error)
    return None


def _lost(lost: Sequence[Entry]) -> UserError:
    """The message for runs that the index knows and whose folders are not to be had."""
    closed = [_closed(entry.folder) for entry in lost]
    lines = []
    for entry, reason in zip(lost, closed, strict=True):
        what = f"cannot be read: {reason}" if reason else "is gone"
        lines.append(f"the folder {entry.path} of run {entry.id} {what}; {_job(entry)}")
    return UserError("\n".join(lines), todo=_ASK if any(closed) else None)


def _job(entry: Entry) -> str:
    """Return what became of a run's job, as far as the index knows, and how to end it without a run folder."""
    number, _, cluster = entry.job_id.partition(";")
    if not number:
        return "it has no known job"
    if number.startswith("local-"):
        return f"its job was {number}: if it still runs, `kill {number.split('-')[1]}` on that machine stops it"
    scancel = f"scancel --clusters={cluster} {number}" if cluster else f"scancel {number}"
    return f"its job was {entry.job_id}: if it still runs, `{scancel}` cancels it"


def _none(text: str, known: Sequence[Entry], roots: Sequence[Path]) -> str:
    import difflib  # here: only this message needs it

    if not known:
        places = ", ".join(str(root) for root in roots) or "no folder was searched"
        return f"no run {text!r}: no runs are known (index {index_file()}; {places})"
    ids = [entry.id for entry in known]
    near = set(difflib.get_close_matches(text, ids, n=_SHOWN, cutoff=0.4))
    near |= {entry.id for entry in known if difflib.SequenceMatcher(None, text, entry.name).ratio() > 0.6}
    listed = [entry for entry in known if entry.id in near] or list(known[:3])
    head = "The nearest:" if near else "The newest:"
    return "\n".join([f"no run {text!r}. {head}", *(_line(entry) for entry in listed[:_SHOWN])])


def _line(entry: Entry) -> str:
    job = f"  job {entry.job_id}" if entry.job_id else ""
    return f"    {entry.id}{job}  {entry.path}"


def _read() -> list[Entry]:
    """The index, newest first, one entry an id (its newest line), whether the folder exists or not."""
    try:
        lines = events.read_lines(index_file())
    except (OSError, RuntimeError):
        return []  # as good as lost: what is searched for is found below the roots
    by_id: dict[str, Entry] = {}
    for line in lines.records:
        if entry := _entry(line):
            by_id[entry.id] = entry
    return _newest_first(by_id.values())


def _entry(line: dict[str, Any]) -> Entry | None:
    names = ("id", "path", "created", "name", "site", "job_id", "directory")
    values = {name: line.get(name, "") for name in names}
    if not all(isinstance(value, str) for value in values.values()) or not (values["id"] and values["path"]):
        return None
    return Entry(**values)


def _newest_first(found: Iterable[Entry]) -> list[Entry]:
    """Sort newest first. Among runs of the same second, the last one in the index is the newest."""
    return sorted(found, key=lambda entry: entry.when)[::-1]


def _run_folders(root: Path) -> Iterator[RunFolder]:
    """Run folders at or below a root, to a small depth; a folder that cannot be read holds none for us."""
    level = [root]
    looked_at = 0
    for depth in range(_DEPTH + 1):
        below: list[Path] = []
        for folder in level:
            if RunFolder(folder).exists:
                yield RunFolder(Path(os.path.abspath(folder)))
                continue
            if depth == _DEPTH:
                continue
            try:
                with os.scandir(folder) as found:
                    for item in found:
                        looked_at += 1
                        if looked_at > _LOOKED_AT:
                            return
                        if not item.name.startswith(".") and item.is_dir(follow_symlinks=False):
                            below.append(Path(item.path))
            except OSError:
                continue
        level = sorted(below)
