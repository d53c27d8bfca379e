"""Which files of a user's project go into the snapshot, found before anything is copied."""

import os
import posixpath
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slurmddp.errors import UserError
from slurmddp.run import git
from slurmddp.run.credentials import CODE_SUFFIXES, credentials_in, named_as_credential
from slurmddp.run.snapshot_filter import (
    NAME,
    SKIPPED_FOLDERS,
    SKIPPED_SUFFIXES,
    below,
    is_image,
    is_run_folder,
    read_ignore,
)
from slurmddp.shared.units import human, listed

DEFAULT_LIMIT = 50 * 2**20  # bytes
DEFAULT_FILES = 20_000
_GIT_TIMEOUT = 30.0  # seconds; only a huge folder with few ignored files takes longer
_DEEPEST = 100  # folders in folders: no code lies there
BY_GIT = "that git ignores"
_NAMED = 30  # paths in a warning


@dataclass(frozen=True)
class Item:
    """One thing to copy.

    relative: its path in the copy; link: text of the symlink to make instead of a copy.
    """

    relative: str
    source: Path
    size: int
    link: str | None = None


@dataclass
class Survey:
    """What a snapshot of `root` would copy, and what it leaves out with a warning."""

    root: Path
    items: list[Item] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    size: int = 0
    left_out: dict[str, int] = field(default_factory=dict)  # reason -> files and folders
    uncounted: bool = False  # nobody knows how many files git ignores

    def summary(self) -> str:
        """Return what is copied, on one line."""
        files = f"{len(self.items):,} {'file' if len(self.items) == 1 else 'files'}, {human(self.size)}"
        top = ""
        if self.size > 2**20:
            size, name = largest(self, 1)[0]
            top = f", the largest: {name} ({human(size)})"
        left_out = ", ".join(f"{count:,} {reason}" for reason, count in self.left_out.items() if count)
        without = ", without what git ignores" if self.uncounted else ""
        return f"{files} of {shown(str(self.root))}{without}{top}{f'; left out: {left_out}' if left_out else ''}"

    def leave_out(self, reason: str, count: int = 1) -> None:
        """Count files, and folders with all that is in them."""
        self.left_out[reason] = self.left_out.get(reason, 0) + count


def survey(
    source: Path, *, limit: int = DEFAULT_LIMIT, max_files: int = DEFAULT_FILES, exclude: Sequence[Path] = ()
) -> Survey:
    """List what belongs to a project folder, or a single script.

    In a git work tree these are the tracked files and the untracked ones that git does not ignore, below that
    folder; else all of it. Where git does not track them: no caches, virtual environments, images of containers
    or credentials (a warning names those). Never: what
    .slurmddpignore names, .git, run folders of ours, and the folders in `exclude` (where
    runs and caches are) that lie below the source. limit: bytes, max_files: entries looked at; a folder above
    either is refused by a UserError that names what is large. Other UserErrors: the source is absent or
    unreadable.
    """
    source = Path(os.path.abspath(source))
    if source.is_file():
        project = Survey(source.parent)
        _add_file(project, source.name, source)
    elif source.is_dir():
        project = Survey(source)
        walk = _Walk(project, limit, max_files, exclude)
        walk.folder("")
        walk.warn()
    else:
        todo = "set it to the folder of your code"
        raise UserError(f"{source} is neither a folder nor a file", where="train.project", todo=todo)
    if project.size > limit:
        raise _too_large(project, limit, f"{human(project.size)} in {len(project.items)} files")
    _resolve_folder_links(project)
    return project


def survey_listed(root: Path, paths: Iterable[str]) -> Survey:
    """Return these files and links of a copy, as they are. Raises UserError for one that cannot be read."""
    project = Survey(root)
    for relative in paths:
        source = root / relative
        (_add_link if source.is_symlink() else _add_file)(project, relative, source)
    return project


class _Walk:
    """Walks one project, through git where it can, and counts what it sees."""

    def __init__(self, project: Survey, limit: int, max_files: int, exclude: Sequence[Path]) -> None:
        self.project = project
        self.limit = limit
        self.max_files = max_files
        self.seen = 0
        self.excluded, self.excluded_really = below(project.root, exclude)
        self.ignore = read_ignore(project.root)
        self.tracked: set[str] = set()
        self.of_runs: dict[str, str] = {"": ""}  # folder -> the folder of runs that it is or lies in, or ""
        # Ordered sets, for the warnings.
        self.secrets: dict[str, str] = {}  # path -> what the file holds, or ""
        self.tracked_secrets: dict[str, str] = {}
        self.code_secrets: dict[str, str] = {}
        self.tracked_runs: dict[str, str] = {}

    def folder(self, relative: str) -> None:
        """Add what belongs to one folder that is the project itself, a submodule or a nested repository."""
        folder = self.project.root / relative
        if not git.in_work_tree(folder):
            self.plain(relative)
            return
        try:
            paths = git.listed(folder, timeout=_GIT_TIMEOUT)
        except git.GitError as error:
            if error.timed_out:
                raise _too_many(self.project, self.limit, f"{error}: it has too many files") from error
            self.project.warnings.append(f"{folder}: copied without asking git ({error})")
            self.plain(relative)
            return
        if not paths:
            # The folder itself is ignored (a home kept in git with `*` ignored): git has nothing to say about
            # it.
            self.plain(relative)
            return
        try:
            self.project.leave_out(BY_GIT, git.ignored(folder, timeout=_GIT_TIMEOUT))
        except git.GitError:  # the project itself is known
            self.project.uncounted = True
        left_out = _unwanted_folders(paths)
        self.tracked |= {posixpath.join(relative, path) for path, tracked in paths if tracked}
        for path, tracked in paths:
            whole = posixpath.join(relative, path)
            if runs := self.runs_around(posixpath.dirname(whole)):
                if tracked:
                    self.tracked_runs[f"{runs}/"] = ""
            elif tracked or not _is_unwanted(path, left_out):
                self.entry(whole, is_repository=True)

    def plain(self, relative: str) -> None:
        """Add all below a folder, without git's help."""
        try:
            entries = sorted(entry.name for entry in (self.project.root / relative).iterdir())
        except OSError as error:
            raise _unreadable(self.project.root / relative, error) from error
        if relative and "pyvenv.cfg" in entries:
            return
        for name in entries:
            self.entry(posixpath.join(relative, name), is_repository=False)

    def repository(self, relative: str) -> None:
        """Add a submodule or nested repository. Without a .git of its own git would list its parent again."""
        path = self.project.root / relative
        if os.path.lexists(path / ".git"):
            self.folder(relative)
            return
        before = self.seen
        self.plain(relative)
        if self.seen == before:
            self.project.warnings.append(f"{shown(relative)}: empty: this git submodule is not checked out")

    def entry(self, relative: str, *, is_repository: bool) -> None:
        """Add one path: a file, a link, or a folder with what is in it."""
        self.seen += 1
        if self.seen > self.max_files:
            raise _too_many(self.project, self.limit, f"more than {self.max_files:,} files")
        if relative.count("/") > _DEEPEST:
            todo = "use a smaller train.project, or snapshot: false"
            raise UserError(
                f"{shown(relative[:80])}... is nested deeper than {_DEEPEST} folders", where="train.project", todo=todo
            )
        if self.ignore.ignored(relative):
            self.project.leave_out(f"by {NAME}")
            return
        source = self.project.root / relative
        try:
            mode = source.lstat().st_mode
        except FileNotFoundError:
            return  # tracked by git and deleted, or removed while we looked
        except OSError as error:
            raise _unreadable(source, error) from error
        is_folder = stat.S_ISDIR(mode)
        if relative in self.excluded or (is_folder and self.runs_around(relative)):
            self.project.leave_out("as runs or caches")
            return
        secret, kind = named_as_credential(relative, is_folder=is_folder), ""
        if secret is None and stat.S_ISREG(mode) and self.is_code(source.name, is_repository=is_repository):
            kind = credentials_in(source) or ""
            secret = relative if kind else None
        if relative in self.tracked:
            if secret:
                self.tracked_secrets[secret] = kind
        elif kind and relative.endswith(CODE_SUFFIXES):
            self.code_secrets[relative] = kind
        elif secret:
            if not (is_folder and os.path.lexists(source / "pyvenv.cfg")):  # .env is also a name for those
                self.secrets[secret] = kind
                self.project.leave_out("as credentials")
            return
        elif is_image(relative) and not is_folder:
            self.project.leave_out("as container images")
            return
        if stat.S_ISLNK(mode):
            self.link(relative, source)
        elif is_folder:
            if is_repository:  # git lists files; a folder in its list is a submodule or a repository of its own
                self.repository(relative)
            elif source.name not in SKIPPED_FOLDERS:
                self.plain(relative)
        elif not stat.S_ISREG(mode):
            self.project.warnings.append(f"{shown(relative)}: not copied: not a file (socket, pipe or device)")
        elif self.is_code(source.name, is_repository=is_repository):
            _add_file(self.project, relative, source)

    @staticmethod
    def is_code(name: str, *, is_repository: bool) -> bool:
        """Return whether a file of this name is copied; git's list is filtered before."""
        return is_repository or not name.endswith(SKIPPED_SUFFIXES)

    def link(self, relative: str, source: Path) -> None:
        """Add a link, unless what it points to is left out: the copy would be that, under another name."""
        target = Path(os.path.realpath(source))
        if target in self.excluded_really:
            return
        root = Path(os.path.realpath(self.project.root))
        if target.is_relative_to(root) and os.path.isfile(target):
            inside = target.relative_to(root).as_posix()
            if runs := self.runs_around(posixpath.dirname(inside)):
                self.project.warnings.append(
                    f"{shown(relative)}: not copied: the link points into the runs folder {shown(runs)}/"
                )
                return
            if inside not in self.tracked:
                if named_as_credential(inside, is_folder=False) or credentials_in(target):
                    self.secrets[relative] = ""
                    return
                if is_image(inside):
                    return
        _add_link(self.project, relative, source)

    def runs_around(self, folder: str) -> str:
        """Return the outermost folder of runs (or excluded one) that this folder is or lies in; "" for none."""
        if folder not in self.of_runs:
            around = self.runs_around(posixpath.dirname(folder))
            if not around and (folder in self.excluded or is_run_folder(self.project.root / folder)):
                around = folder
            self.of_runs[folder] = around
        return self.of_runs[folder]

    def warn(self) -> None:
        """One warning of each kind of thing that was left out, or copied, against what one may expect."""
        for paths, text in (
            (self.secrets, "not copied, because they look like credentials (git add them if they are not)"),
            (self.tracked_secrets, "copied although they look like credentials, because git tracks them"),
            (self.code_secrets, "copied although they hold credentials, because they are code (see environment_from)"),
            (self.tracked_runs, "not copied although git tracks files there, because they are runs or caches"),
        ):
            if paths:
                self.project.warnings.append(f"{text}: {_named(paths)}")


def _named(paths: Mapping[str, str]) -> str:
    return listed([f"{shown(path)} ({what})" if what else shown(path) for path, what in paths.items()], _NAMED)


def _unwanted_folders(paths: list[tuple[str, bool]]) -> tuple[str, ...]:
    """Folders among git's untracked files that are virtual environments."""
    files = (path.rpartition("/") for path, tracked in paths if not tracked)
    return tuple(folder + "/" for folder, _, name in files if folder and name == "pyvenv.cfg")


def _is_unwanted(path: str, left_out: tuple[str, ...]) -> bool:
    folders = path.split("/")[:-1]
    return (
        path.endswith(SKIPPED_SUFFIXES)
        or path.startswith(left_out)
        or any(folder in SKIPPED_FOLDERS for folder in folders)
    )


def _add_file(project: Survey, relative: str, source: Path) -> None:
    try:
        facts = source.stat()
    except OSError as error:
        raise _unreadable(source, error) from error
    project.items.append(Item(relative, source, facts.st_size))
    project.size += facts.st_size


def _add_link(project: Survey, relative: str, source: Path) -> None:
    """A link to a file of the project becomes a copy of it, one to a folder in it a relative link."""
    root = project.root.resolve()
    target = Path(os.path.realpath(source))  # Path.resolve raises for a link that points to itself
    points_to = shown(str(source.readlink()))
    if not os.path.exists(target):  # Path.exists raises where we may not look
        project.warnings.append(f"{shown(relative)}: not copied: broken link ({points_to})")
    elif not target.is_relative_to(root):
        project.warnings.append(
            f"{shown(relative)}: not copied: the link points out of the project ({points_to}); "
            "copy it in, or bind what it points to"
        )
    elif target.is_dir():
        inside = target.relative_to(root).as_posix()
        here = posixpath.dirname(relative) or "."
        project.items.append(Item(relative, source, 0, link=posixpath.relpath(inside, here)))
    else:
        _add_file(project, relative, target)


def _resolve_folder_links(project: Survey) -> None:
    """Drop links to folders of which nothing is copied: they would point to nothing."""
    folders = {"."}
    for item in project.items:
        parent = posixpath.dirname(item.relative)
        while parent and parent not in folders:
            folders.add(parent)
            parent = posixpath.dirname(parent)
    kept = []
    for item in project.items:
        if item.link is not None:
            target = posixpath.normpath(posixpath.join(posixpath.dirname(item.relative), item.link))
            if target not in folders:
                project.warnings.append(
                    f"{shown(item.relative)}: not copied: nothing in the folder it links to is copied"
                )
                continue
        kept.append(item)
    project.items = kept


def _unreadable(path: Path, error: OSError) -> UserError:
    todo = (
        "make it readable, or exclude it: .gitignore in a git repository, a smaller train.project, or snapshot: false"
    )
    return UserError(f"{shown(str(path))} cannot be read: {error.strerror}", todo=todo)


_TODO = (
    "let .slurmddpignore or .gitignore name what is no code, use a smaller train.project, snapshot: false (run the "
    "code in place)"
)


def _too_many(project: Survey, limit: int, what: str) -> UserError:
    """A larger snapshot_limit, which counts bytes, would not help."""
    return _too_large(
        project, limit, f"{what} (seen so far: {human(project.size)})", f"{_TODO}; no key raises this limit"
    )


def _too_large(project: Survey, limit: int, what: str, todo: str = "") -> UserError:
    lines = [f"    {human(size):>10}  {name}" for size, name in largest(project)]
    return UserError(
        f"{project.root} is too large to copy into the run folder: {what}, the limit is {human(limit)}. "
        "The largest:\n" + "\n".join(lines),
        where="train.project",
        todo=todo or f"{_TODO}, or a higher limit, such as --set snapshot_limit=100M",
    )


def largest(project: Survey, count: int = 5) -> list[tuple[int, str]]:
    """Return (bytes, name) of the largest first-level entries; a file that is most of its folder is named itself."""
    groups: dict[str, list[Item]] = {}
    for item in project.items:
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
    """Return a path for a message: on one line, whatever bytes it has."""
    return path if path.isprintable() else repr(path)
