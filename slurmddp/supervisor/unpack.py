"""Unpacks the code of a run to the node's own disk, once per node and attempt. The cleanup after it removes it."""

import errno
import fcntl
import grp
import io
import os
import pwd
import shutil
import stat
import zipfile
from typing import List, Optional

from slurmddp.records.owners import replaced_by_others
from slurmddp.records.refusal import Refused

#: Links on the way to a folder, after which Linux gives up, too.
_LINKS = 40


def scratch_folder(node_folder: str) -> str:
    """Make the folder of this user on the node's own disk, which keeps compiled kernels for the next attempt and the
    next run. Other users can guess its name and make it first: only a folder of our own will do. Raises Refused.
    """
    _check_way(node_folder)  # before anything is made by way of a stranger's link
    before = os.umask(0o022)
    os.umask(before | 0o022)
    try:
        os.makedirs(node_folder, exist_ok=True)
    except OSError as error:
        raise Refused("cannot create the folder {} (paths.node): {}".format(node_folder, error.strerror)) from error
    finally:
        os.umask(before)
    _check_way(node_folder)
    scratch = "{}/slurmddp-{}".format(node_folder, os.getuid())
    try:
        try:
            os.mkdir(scratch, 0o700)
        except FileExistsError:
            pass
        facts = os.lstat(scratch)
        if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid():
            raise Refused(
                "{} is not a folder of yours: another user may have put it there. Set paths.node to a folder of "
                "yours".format(scratch)
            )
        os.chmod(scratch, 0o700)
    except OSError as error:
        raise Refused("cannot create the folder {}: {}".format(scratch, error.strerror)) from error
    return scratch


def _check_way(path: str) -> None:
    """Raise Refused if another user could replace a folder or link on the way to a folder, or what is ours in it.

    Each must belong to us or root; where others may write, the sticky bit protects our files.
    """
    weak = _weak_part(path)
    if weak is not None:
        raise Refused(
            "other users can replace files in {} (paths.node), by way of: {} - set paths.node to a folder on whose way "
            "only you and root can rename files, or set the sticky bit: chmod +t FOLDER".format(path, weak)
        )


def _weak_part(path: str) -> Optional[str]:
    """Return what another user could replace on the way to a folder, as `ls -l` shows it. What is not there yet is
    made by us.
    """
    here, links = "/", 0
    ahead = _parts(path)
    while True:
        try:
            facts = os.lstat(here)
        except FileNotFoundError:
            return None
        except OSError as error:
            return "{} ({})".format(here, error.strerror)
        if replaced_by_others(facts):
            names = (stat.filemode(facts.st_mode), _user(facts.st_uid), _group(facts.st_gid), here)
            return " ".join(names)
        if stat.S_ISLNK(facts.st_mode):
            links += 1
            if links > _LINKS:
                return "{} ({})".format(here, os.strerror(errno.ELOOP))
            target = os.readlink(here)
            ahead += _parts(target)
            here = "/" if target.startswith("/") else os.path.dirname(here)
            continue
        if not ahead:
            return None
        part = ahead.pop()
        here = os.path.dirname(here) if part == ".." else os.path.join(here, part)


def _parts(path: str) -> List[str]:
    """Return the names in a path, the last first."""
    return [part for part in path.split("/") if part not in ("", ".")][::-1]


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _group(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


def unpack(archive: str, folder: str) -> str:
    """Unpack an archive once below a folder, however many ranks of the node ask for it; return where. Raises Refused.

    Whatever has the final name is whole: it was renamed to it.
    """
    target = folder + "/code"
    try:
        if not os.path.isdir(folder):
            os.makedirs(folder, 0o700, exist_ok=True)
        with open(folder + "/code.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel lets go of it with whoever has it
            if not os.path.isdir(target):
                _remove_left(folder)
                part = target + ".part"
                shutil.rmtree(part, ignore_errors=True)
                with zipfile.ZipFile(io.BytesIO(_read(archive))) as files:
                    files.extractall(part)
                os.rename(part, target)
    except OSError as error:
        raise Refused("cannot unpack the run's code to {}: {}".format(target, error.strerror)) from error
    except (zipfile.BadZipFile, EOFError) as error:
        raise Refused(
            "the run's copy of the code is damaged, {} ({}). Submit again with --resume {}".format(
                archive, error, os.path.basename(os.path.dirname(os.path.dirname(archive)))
            )
        ) from error
    return target


def _remove_left(folder: str) -> None:
    """Remove the code of attempts that are over, and that no cleanup has reached: this node was lost to their jobs."""
    scratch, own = os.path.split(folder)
    left = [name for name in os.listdir(scratch) if name != own and os.path.isdir(os.path.join(scratch, name, "code"))]
    if not left:
        return
    from slurmddp.supervisor.ranks import read  # only here: each module costs the start of a node

    processes = filter(str.isdigit, os.listdir("/proc"))
    lives = b"".join(read("/proc/{}/environ".format(process)) or b"" for process in processes)
    for name in left:
        if os.fsencode(name) not in lives:  # in SLURMDDP_RENDEZVOUS_ID, of node.sh and all that it starts
            for part in ("code", "code.part"):
                shutil.rmtree(os.path.join(scratch, name, part), ignore_errors=True)
            try:
                os.unlink(os.path.join(scratch, name, "code.lock"))
                os.rmdir(os.path.join(scratch, name))
            except OSError:
                pass  # compilers keep something there


def _read(archive: str) -> bytes:
    try:
        with open(archive, "rb") as file:
            return file.read()
    except OSError as error:
        raise Refused("cannot read the run's copy of the code, {}: {}".format(archive, error.strerror)) from error
