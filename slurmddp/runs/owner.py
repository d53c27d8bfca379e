"""Whose a run is: what the run of somebody else names must not run as its reader."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

from slurmddp.runs.layout import RunFolder


def foreign_owner(folder: RunFolder) -> str | None:
    """Return the user, other than us, who owns the run or what it would execute; None if all of it is ours.

    A folder that was copied or unpacked counts as its new owner's.
    """
    for path in (folder.path, folder.manifest, folder.job_yaml, folder.site_yaml, folder.code, folder.code_runtime):
        for look in (os.lstat, os.stat):
            try:
                owner = look(path).st_uid
            except OSError:  # Not there, or not to be read: then nothing of it is executed.
                continue
            if owner != os.geteuid():
                return _name(owner)
    return None


def shared_folder(root: Path) -> str | None:
    """Return a warning if other users can replace a folder of runs, or one above it; None if they cannot."""
    for path in (root, *root.parents):
        try:
            facts = path.stat()
        except OSError:  # It will be made, without write access for others.
            continue
        others = stat.S_IWOTH | (0 if _is_private(facts.st_gid) else stat.S_IWGRP)
        if facts.st_mode & others and not facts.st_mode & stat.S_ISVTX:
            return (
                f"other users can rename folders in {path}, so they can put a run folder of theirs in the place of "
                f"yours: chmod +t {path}, or choose another runs folder: --set paths.runs=FOLDER"
            )
    return None


def _is_private(gid: int) -> bool:
    """Return whether a group is the user's own, as many systems make one per user."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return user.pw_gid == gid and group.gr_name == user.pw_name and not group.gr_mem


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
