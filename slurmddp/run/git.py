"""What git says about a folder: the files that belong to the project, the commit, whether it is dirty.

A folder that was copied from somebody brings that person's .git/config, which can name programs. git runs none of them
here: no filter, no file system monitor, no hook, no transport.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# A hook or an alias that runs us exports these, and git would then look at another repository than the
# folder's.
_REDIRECTS = frozenset((
    "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR", "GIT_NAMESPACE",
    "GIT_OBJECT_DIRECTORY",
))  # fmt: skip

# Programs of a configuration: `git status` starts them. The second one is for a clone that lacks objects, which git
# would fetch by whatever program the configuration names for it (GIT_NO_LAZY_FETCH: git 2.45 and newer).
_NO_PROGRAMS = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")
_NO_TRANSPORTS = {"GIT_ALLOW_PROTOCOL": "none", "GIT_NO_LAZY_FETCH": "1", "GIT_TERMINAL_PROMPT": "0"}


@dataclass(eq=False)  # an exception has to take its traceback and be hashable
class GitError(Exception):
    """git is absent, refused, or took too long; `timed_out`: the last of these. Callers continue without git."""

    message: str
    timed_out: bool = False

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class GitState:
    """The commit (40 hex digits; None before the first), whether files differ from it, the tree's root."""

    commit: str | None
    dirty: bool
    root: str


def in_work_tree(folder: Path) -> bool:
    """Return whether a .git lies in the folder or above it: a cheap test, before git is asked."""
    return any(os.path.lexists(path / ".git") for path in (folder, *folder.parents))


def listed(folder: Path, *, timeout: float) -> list[tuple[str, bool]]:
    """Return (relative path, tracked) of a folder's tracked files and of untracked ones that git does not ignore.

    Submodules and nested repositories are one entry each. Raises GitError.
    """
    out = run(folder, ("ls-files", "-c", "-o", "-t", "--exclude-standard", "-z"), timeout=timeout)
    found: dict[str, bool] = {}
    for record in out.split(b"\0"):
        if record:
            # A file with merge conflicts is listed once for each stage.
            tag, _, path = record.partition(b" ")
            found[os.fsdecode(path.rstrip(b"/"))] = tag != b"?"
    return sorted(found.items())


def ignored(folder: Path, *, timeout: float) -> int:
    """Return how many files git ignores below a folder; a folder that it ignores as a whole counts once.

    Raises GitError.
    """
    options = ("-o", "-i", "--exclude-standard", "--directory", "--no-empty-directory", "-z")
    return run(folder, ("ls-files", *options), timeout=timeout).count(b"\0")


def state(folder: Path, *, timeout: float = 20.0) -> GitState | None:
    """Return the folder's git state; None if it lies in no work tree.

    Raises GitError (absent, refused, too slow).
    """
    if not in_work_tree(folder):
        return None
    root = os.fsdecode(run(folder, ("rev-parse", "--show-toplevel"), timeout=timeout).rstrip(b"\n"))
    try:
        commit = run(folder, ("rev-parse", "--verify", "--quiet", "HEAD"), timeout=timeout).decode().strip()
    except GitError as error:
        if error.timed_out:
            raise
        commit = ""  # a repository before its first commit
    return GitState(commit or None, _is_dirty(folder, timeout, set()), root)


def _is_dirty(folder: Path, timeout: float, seen: set[str]) -> bool:
    """Return whether files differ from the commit, also in submodules. `seen`: real paths: links can make circles."""
    # git asks a submodule by a git of its own, which reads that one's configuration; so submodules are asked here.
    # Limited to the folder: an edit elsewhere in a large repository is no edit of this project.
    status = ("status", "--porcelain", "-z", "--ignore-submodules=dirty", "--", ".")
    if run(folder, status, timeout=timeout, options=_no_filters(folder, timeout)):
        return True
    seen.add(os.path.realpath(folder))
    for record in run(folder, ("ls-files", "-s", "-z"), timeout=timeout).split(b"\0"):
        if record.startswith(b"160000 "):
            path = folder / os.fsdecode(record.partition(b"\t")[2])
            new = os.path.realpath(path) not in seen
            if new and os.path.lexists(path / ".git") and _is_dirty(path, timeout, seen):
                return True
    return False


def _no_filters(folder: Path, timeout: float) -> list[str]:
    """Options that switch every filter off (gitattributes(5)), whichever configuration defines it. Raises GitError.

    A file that a filter would change, such as one of LFS, then counts as changed where git has to look into it.
    """
    names = run(folder, ("config", "-z", "--name-only", "--get-regexp", r"^filter\."), timeout=timeout, none=1)
    drivers = {os.fsdecode(name.rpartition(b".")[0]) for name in names.split(b"\0") if name}
    options: list[str] = []
    for driver in sorted(drivers):
        if "=" in driver or "\n" in driver:  # no -c can name it
            raise GitError(f"not running git in {folder}: its configuration has a filter with an unusual name")
        for setting in ("clean=", "smudge=", "process=", "required=false"):
            options += ["-c", f"{driver}.{setting}"]
    return options


def run(
    folder: Path, arguments: Sequence[str], *, timeout: float, options: Sequence[str] = (), none: int | None = None
) -> bytes:
    """Return standard output of a git command in a folder. Raises GitError.

    timeout: seconds; options: git's own; none: an exit code that means "nothing found".
    """
    import subprocess  # here: 20 ms that many commands do not need

    command = ["git", *_NO_PROGRAMS, *options, "--no-optional-locks", "-C", str(folder), *arguments]
    environment = {name: value for name, value in os.environ.items() if name not in _REDIRECTS} | _NO_TRANSPORTS
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise GitError(f"git took more than {timeout:g} s in {folder}", timed_out=True) from error
    except OSError as error:
        raise GitError(f"git could not be started: {error.strerror}") from error
    if done.returncode not in (0, none):
        said = done.stderr.decode("utf-8", errors="backslashreplace").strip()
        raise GitError(said or f"git {arguments[0]} failed with exit code {done.returncode}")
    return done.stdout
