"""Which files of a user's project go into the snapshot, found before anything is copied."""

from __future__ import annotations

import json
import os
import posixpath
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from slurmddp.errors import UserError
from slurmddp.runs import git

DEFAULT_LIMIT = 50 * 2**20  # bytes
DEFAULT_FILES = 20_000
_GIT_TIMEOUT = 30.0  # seconds; only a huge folder with few ignored files takes longer
_SKIPPED_FOLDERS = frozenset({".git", "__pycache__", ".venv", "venv", "node_modules", ".cache"})
_SKIPPED_SUFFIXES = (".pyc", ".pyo")


@dataclass(frozen=True)
class Item:
    """One thing to copy.

    relative: its path in the copy; link: text of the symlink to make instead of a copy.
    """

    relative: str
    source: Path
    size: int
    executable: bool = False
    link: str | None = None


@dataclass
class Survey:
    """What a snapshot of `root` would copy, and what it leaves out with a warning."""

    root: Path
    items: list[Item] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    size: int = 0


def survey(source: Path, *, limit: int = DEFAULT_LIMIT, max_files: int = DEFAULT_FILES) -> Survey:
    """List what belongs to a project folder, or a single script.

    In a git work tree these are the tracked files and the untracked ones that git does not ignore, below that
    folder; else all of it. Never: .git, caches, virtual environments and (where git does not track them) our
    own run folders. limit: bytes, max_files: entries looked at; a folder above either is refused by a
    UserError that names what is large. Other UserErrors: the source is absent or unreadable.
    """
    source = Path(os.path.abspath(source))
    if source.is_file():
        found = Survey(source.parent)
        _add_file(found, source.name, source)
    elif source.is_dir():
        found = Survey(source)
        _Walk(found, limit, max_files).folder("")
    else:
        raise UserError(
            f"{source} is neither a folder nor a file",
            where="train.project",
            todo="name the folder of your code",
        )
    if found.size > limit:
        raise _too_large(found, limit, f"{human(found.size)} in {len(found.items)} files")
    _resolve_folder_links(found)
    return found


class _Walk:
    """Walks one project, through git where it can, and counts what it sees."""

    def __init__(self, found: Survey, limit: int, max_files: int) -> None:
        self.found = found
        self.limit = limit
        self.max_files = max_files
        self.seen = 0

    def folder(self, relative: str) -> None:
        """Add what belongs to one folder that is the project itself, a submodule or a nested repository."""
        place = self.found.root / relative
        if not git.in_work_tree(place):
            self.plain(relative)
            return
        try:
            paths = git.listed(place, timeout=_GIT_TIMEOUT)
        except git.GitError as error:
            if error.timed_out:
                raise _too_many(self.found, self.limit, f"{error}: it has too many files") from error
            self.found.warnings.append(f"{place}: taken without git ({error})")
            self.plain(relative)
            return
        if not paths:
            # The folder itself is ignored (a home kept in git with `*` ignored): git has nothing to say about
            # it.
            self.plain(relative)
            return
        left_out = _unwanted_folders(place, paths)
        for path, tracked in paths:
            if not tracked and _is_unwanted(path, left_out):
                continue
            self.entry(posixpath.join(relative, path), is_repository=True)

    def plain(self, relative: str) -> None:
        """Add all below a folder, without git's help."""
        try:
            entries = sorted(entry.name for entry in (self.found.root / relative).iterdir())
        except OSError as error:
            raise _unreadable(self.found.root / relative, error) from error
        if relative and ("pyvenv.cfg" in entries or _is_run_folder(self.found.root / relative, entries)):
            return
        for name in entries:
            self.entry(posixpath.join(relative, name), is_repository=False)

    def repository(self, relative: str) -> None:
        """Add a submodule or nested repository. Without a .git of its own git would list its parent again."""
        place = self.found.root / relative
        if os.path.lexists(place / ".git"):
            self.folder(relative)
            return
        before = self.seen
        self.plain(relative)
        if self.seen == before:
            self.found.warnings.append(f"{shown(relative)}: empty, this git submodule is not checked out")

    def entry(self, relative: str, *, is_repository: bool) -> None:
        """Add one path: a file, a link, or a folder with what is in it."""
        self.seen += 1
        if self.seen > self.max_files:
            raise _too_many(self.found, self.limit, f"more than {self.max_files:,} files")
        source = self.found.root / relative
        try:
            mode = source.lstat().st_mode
        except FileNotFoundError:
            return  # tracked by git and deleted, or removed while we looked
        except OSError as error:
            raise _unreadable(source, error) from error
        if stat.S_ISLNK(mode):
            _add_link(self.found, relative, source)
        elif stat.S_ISDIR(mode):
            if is_repository:  # git lists files; a folder in its list is a submodule or a repository of its own
                self.repository(relative)
            elif source.name not in _SKIPPED_FOLDERS:
                self.plain(relative)
        elif not stat.S_ISREG(mode):
            self.found.warnings.append(f"{shown(relative)}: left out, it is no file (socket, pipe or device)")
        elif is_repository or not source.name.endswith(_SKIPPED_SUFFIXES):
            _add_file(self.found, relative, source)


def _unwanted_folders(place: Path, paths: list[tuple[str, bool]]) -> tuple[str, ...]:
    """Folders among git's untracked files that are virtual environments or run folders of ours."""
    untracked = {path for path, tracked in paths if not tracked}
    found = []
    for path in untracked:
        folder, name = posixpath.split(path)
        if not folder:
            continue
        if name == "pyvenv.cfg" or (
            name == "manifest.json" and _is_run_folder(place / folder, [name, *_beside(untracked, folder)])
        ):
            found.append(folder + "/")
    return tuple(found)


def _beside(paths: set[str], folder: str) -> Iterator[str]:
    if f"{folder}/job.json" in paths:
        yield "job.json"


def _is_unwanted(path: str, left_out: tuple[str, ...]) -> bool:
    folders = path.split("/")[:-1]
    return (
        path.endswith(_SKIPPED_SUFFIXES)
        or path.startswith(left_out)
        or any(folder in _SKIPPED_FOLDERS for folder in folders)
    )


def _is_run_folder(place: Path, names: list[str]) -> bool:
    """Whether this is a run folder of ours: its job.json, and a manifest that says so."""
    if "manifest.json" not in names or "job.json" not in names:
        return False
    try:
        manifest = json.loads((place / "manifest.json").read_bytes())
    except (OSError, ValueError):
        return False  # unreadable or somebody else's: then it is a folder like any other
    return isinstance(manifest, dict) and "run" in manifest and "slurmddp" in manifest


def _add_file(found: Survey, relative: str, source: Path) -> None:
    try:
        facts = source.stat()
    except OSError as error:
        raise _unreadable(source, error) from error
    found.items.append(Item(relative, source, facts.st_size, bool(facts.st_mode & 0o111)))
    found.size += facts.st_size


def _add_link(found: Survey, relative: str, source: Path) -> None:
    """A link to a file of the project becomes a copy of it, one to a folder in it a relative link."""
    root = found.root.resolve()
    target = Path(os.path.realpath(source))  # Path.resolve raises for a link that points to itself
    points_to = shown(str(source.readlink()))
    if not target.exists():
        found.warnings.append(f"{shown(relative)}: left out, the link points to nothing ({points_to})")
    elif not target.is_relative_to(root):
        found.warnings.append(
            f"{shown(relative)}: left out, the link points out of the project ({points_to}); "
            "copy it in, or bind what it points to"
        )
    elif target.is_dir():
        inside = target.relative_to(root).as_posix()
        here = posixpath.dirname(relative) or "."
        found.items.append(Item(relative, source, 0, link=posixpath.relpath(inside, here)))
    else:
        _add_file(found, relative, target)


def _resolve_folder_links(found: Survey) -> None:
    """Drop links to folders of which nothing is copied: they would point to nothing."""
    folders = {"."}
    for item in found.items:
        parent = posixpath.dirname(item.relative)
        while parent and parent not in folders:
            folders.add(parent)
            parent = posixpath.dirname(parent)
    kept = []
    for item in found.items:
        if item.link is not None:
            target = posixpath.normpath(posixpath.join(posixpath.dirname(item.relative), item.link))
            if target not in folders:
                found.warnings.append(f"{shown(item.relative)}: left out, nothing of the folder it links to is copied")
                continue
        kept.append(item)
    found.items = kept


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(
        f"{shown(str(path))} cannot be read: {error.strerror}",
        todo="make it readable, or leave it out: .gitignore in a git repository, a smaller train.project, "
        "or snapshot: false",
    )


def _too_many(found: Survey, limit: int, what: str) -> UserError:
    return _too_large(found, limit, f"{what} (looked at so far: {human(found.size)})")


def _too_large(found: Survey, limit: int, what: str) -> UserError:
    lines = [f"    {human(size):>10}  {name}" for size, name in largest(found)]
    return UserError(
        f"{found.root} is too large to copy into the run folder: {what}, the limit is {human(limit)}. "
        "The largest:\n" + "\n".join(lines),
        where="train.project",
        todo="a smaller train.project; a .gitignore in its git repository; snapshot: false to run the code "
        "where it lies; or a higher limit, in MiB: --set snapshot_limit=N",
    )


def largest(found: Survey, count: int = 5) -> list[tuple[int, str]]:
    """(bytes, name) of the largest first-level entries; a file that is most of its folder is named itself."""
    groups: dict[str, list[Item]] = {}
    for item in found.items:
        groups.setdefault(item.relative.split("/", 1)[0], []).append(item)
    sizes = []
    for group, items in groups.items():
        total = sum(item.size for item in items)
        top = max(items, key=lambda item: item.size)
        if len(items) == 1 or top.size * 2 > total:
            sizes.append((top.size, shown(top.relative)))
        else:
            sizes.append((total, f"{shown(group)}/ ({len(items):,} files)"))
    return sorted(sizes, key=lambda pair: (-pair[0], pair[1]))[:count]


def shown(path: str) -> str:
    """A path for a message: on one line, whatever bytes it has."""
    return path if path.isprintable() else repr(path)


def human(size: int) -> str:
    """Bytes for people: 512 B, 1.5 MiB."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
