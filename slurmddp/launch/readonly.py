"""Run a command that can write in its own folders only: python -I -S readonly.py FOLDER TMP [CACHE ...] -- COMMAND...

A rehearsal starts the ranks of a script with it (launch.wrap): whatever writes, in whatever language, all other files
are read-only. FOLDER and each CACHE stay writable. /tmp shows what is in it, read-only, and takes new files in
TMP. Devices, /dev/shm and pipes stay as they are. This process becomes the command (exec), so signals and exit codes
are the command's. Needs a mount namespace, which an ordinary user gets with a user namespace of his own. Standard
library only.
"""

import ctypes
import os
import re
import stat
import sys
from typing import NoReturn

#: Exit code where this machine allows no namespaces.
NO_NAMESPACES = 97
_NEWNS, _NEWUSER = 0x20000, 0x10000000
_RDONLY, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 32, 4096, 16384, 1 << 18
#: mount(2)'s numbers of what a mount has already: nobody can take that away in a user namespace.
_KEPT = {"nosuid": 2, "nodev": 4, "noexec": 8, "noatime": 1024, "nodiratime": 2048, "relatime": 1 << 21}
#: Kernel file systems: nothing of the user's is there.
_OF_KERNEL = {"proc", "sysfs", "devpts", "mqueue", "cgroup", "cgroup2", "devtmpfs", "hugetlbfs", "securityfs", "bpf"}
_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def _mount(source: str, target: str, flags: int) -> None:
    _call("mount", os.fsencode(source), os.fsencode(target), None, ctypes.c_ulong(flags), None)


def _enter_namespaces() -> None:
    uid, gid = os.geteuid(), os.getegid()
    _call("unshare", _NEWNS if uid == 0 else _NEWNS | _NEWUSER)
    if uid != 0:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    _mount("none", "/", _REC | _PRIVATE)


def _mounts() -> list[tuple[str, str, list[str]]]:
    """Return mount point, file system and options of each mount, in their order."""
    found = []
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            fields = line.split(" ")
            point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
            found.append((point, fields[fields.index("-") + 1], fields[5].split(",")))
    return found


def _show_tmp(place: str) -> None:
    """Put `place` over /tmp, and into it all that is in /tmp."""
    os.makedirs(place, exist_ok=True)
    old = os.open("/tmp", os.O_PATH)
    entries = [(entry.name, entry.stat(follow_symlinks=False).st_mode) for entry in os.scandir("/tmp")]
    _mount(place, "/tmp", _BIND | _REC)
    for name, mode in entries:
        source, target = f"/proc/self/fd/{old}/{name}", f"/tmp/{name}"
        try:
            if stat.S_ISLNK(mode):
                os.symlink(os.readlink(source), target)
                continue
            if stat.S_ISDIR(mode):
                os.makedirs(target, exist_ok=True)
            else:
                os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o600))
            _mount(source, target, _BIND | _REC)
        except OSError:
            continue  # it has gone meanwhile, or another rank has made the link
    os.close(old)


def protect(folder: str, tmp: str, caches: list[str]) -> None:
    """Make everything else read-only for this process and its children. Raises OSError."""
    _enter_namespaces()
    here = os.getcwd()
    writable = [os.path.realpath(path) for path in (folder, *caches) if os.path.isdir(path)]
    for path in writable:
        _mount(path, path, _BIND | _REC)
    _show_tmp(os.path.realpath(tmp))
    for point, kind, options in _mounts():
        open_ = point == "/tmp" or any(point == path or point.startswith(path + "/") for path in writable)
        if open_ or kind in _OF_KERNEL or point == "/dev" or point.startswith("/dev/"):
            continue
        flags = sum(_KEPT.get(option, 0) for option in options)
        try:
            _mount("none", point, _BIND | _REMOUNT | _RDONLY | flags)
        except (FileNotFoundError, PermissionError):
            continue  # a mount that another one covers, or below a folder of others: not within this user's reach
    os.chdir(here)


def main(words: list[str]) -> NoReturn:
    """Become the command."""
    own, command = words[: words.index("--")], words[words.index("--") + 1 :]
    try:
        protect(own[0], own[1], own[2:])
    except OSError as error:
        print(f"slurmddp: no namespace in which files are read-only: {error}", file=sys.stderr)
        raise SystemExit(NO_NAMESPACES) from None
    os.environ["TMPDIR"] = "/tmp"
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
