"""Whether other users can change a file or folder, or put another one in its place."""

import os
import stat


def written_by_others(facts: os.stat_result) -> bool:
    """Return whether others may write to a file or folder. A group of this user alone does not count, nor root's."""
    shared = facts.st_mode & stat.S_IWGRP and not _is_private(facts.st_gid)
    return bool(facts.st_mode & stat.S_IWOTH or shared)


def replaced_by_others(facts: os.stat_result) -> bool:
    """Return whether others own a file, link or folder, or can rename what lies in it."""
    return facts.st_uid not in (os.geteuid(), _root()) or renamed_by_others(facts)


def renamed_by_others(facts: os.stat_result) -> bool:
    """Return whether others can rename what lies in a folder: the sticky bit prevents that."""
    return stat.S_ISDIR(facts.st_mode) and written_by_others(facts) and not facts.st_mode & stat.S_ISVTX


def _root() -> int:
    try:
        return os.stat("/proc").st_uid  # as a user namespace names it
    except OSError:
        return 0


def _is_private(gid: int) -> bool:
    """Return whether a group has one user: this one, as many systems make one per user, or root."""
    import grp  # here: ranks do not need them
    import pwd

    # In a user namespace without root, its number stands for everybody who has none there.
    for uid in (os.geteuid(), 0) if _root() == 0 else (os.geteuid(),):
        try:
            user, group = pwd.getpwuid(uid), grp.getgrgid(gid)
        except KeyError:
            continue
        if user.pw_gid == gid and group.gr_name == user.pw_name and not set(group.gr_mem) - {user.pw_name}:
            return True
    return False
