"""Whose a run is: what the run of somebody else names must not run as its reader."""

from __future__ import annotations

import os
import pwd

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


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
