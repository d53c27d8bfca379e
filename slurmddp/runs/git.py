"""What git says about a folder: the files that belong to the project, the commit, whether it is dirty."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# A hook or an alias that runs us exports these, and git would then look at another repository than the
# folder's.
_REDIRECTS = frozenset(
    {
        "GIT_DIR",
        "GIT_WORK_TREE",
        "GIT_INDEX_FILE",
        "GIT_PREFIX",
        "GIT_COMMON_DIR",
        "GIT_NAMESPACE",
        "GIT_OBJECT_DIRECTORY",
    }
)


@dataclass(frozen=True)
class GitError(Exception):
    """git is absent, refused, or took too long; `timed_out` tells the last. Callers go on without git."""

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
    """Whether a .git lies in the folder or above it: a cheap test, before git is asked."""
    return any(os.path.lexists(place / ".git") for place in (folder, *folder.parents))


def listed(folder: Path, *, timeout: float) -> list[tuple[str, bool]]:
    """(relative path, tracked) of a folder's tracked files and of untracked ones that git does not ignore.

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


def state(folder: Path, *, timeout: float = 20.0) -> GitState | None:
    """The folder's git state; None where it lies in no work tree.

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
    # Limited to the folder: an edit elsewhere in a large repository is no edit of this project.
    changes = run(folder, ("status", "--porcelain", "-z", "--", "."), timeout=timeout)
    return GitState(commit or None, bool(changes), root)


def run(folder: Path, arguments: Sequence[str], *, timeout: float) -> bytes:
    """Standard output of a git command in a folder. Raises GitError. `timeout`: seconds."""
    import subprocess  # here: 20 ms that many commands do not need

    command = ["git", "-c", "core.fsmonitor=false", "--no-optional-locks", "-C", str(folder), *arguments]
    environment = {name: value for name, value in os.environ.items() if name not in _REDIRECTS}
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise GitError(f"git took more than {timeout:g} s in {folder}", timed_out=True) from error
    except OSError as error:
        raise GitError(f"git could not be started: {error.strerror}") from error
    if done.returncode != 0:
        said = done.stderr.decode("utf-8", errors="backslashreplace").strip()
        raise GitError(said or f"git {arguments[0]} failed with exit code {done.returncode}")
    return done.stdout
