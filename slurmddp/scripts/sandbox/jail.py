"""Run one command in namespaces of its own: no network, no outside process, no file of the user, limits on everything.

A program of its own, started as `python -I -S jail.py` with a JSON list of runs on stdin; it writes what each recorded
as JSON. Each run is {files, binds, links, env, argv, folder, host, user, seconds, processor}. It needs no helper but
Linux namespaces.

The caller is replaced by an ordinary user first (nobody, if root starts it), so that nothing of root is within reach.
The root of the file system is a small tmpfs: bash, its libraries and the filters are mounted into it, read-only."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import resource
import signal
import stat
import sys
import time
from typing import Any, NoReturn

RECORDS = "/.sandbox/records"
_NOBODY = 65534
_NEWNS, _NEWUSER = 0x20000, 0x10000000
_SPACES = _NEWNS | 0x20000000 | 0x8000000 | 0x4000000 | 0x40000000  # mount, pid, ipc, uts, net
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
_LIMITS = {
    resource.RLIMIT_CORE: 0,
    resource.RLIMIT_NPROC: 48,
    resource.RLIMIT_NOFILE: 128,
    resource.RLIMIT_DATA: 64 << 20,
    resource.RLIMIT_AS: 256 << 20,
    resource.RLIMIT_FSIZE: 2 << 20,
    resource.RLIMIT_MEMLOCK: 0,
    resource.RLIMIT_MSGQUEUE: 0,
}
#: keyctl's number, by machine.
_KEYCTL = {"x86_64": 250, "aarch64": 219, "riscv64": 219, "ppc64le": 271, "s390x": 280}
_MOST = 6 << 20  # bytes of records
_FOLDERS = ("usr/bin", "usr/local/bin", "dev", "proc", "tmp", "etc", RECORDS[1:], ".old")
_LIBRARIES = ("lib", "lib64", "lib32", "usr/lib", "usr/lib64", "usr/lib32")
_DEVICES = ("dev/null", "dev/zero", "dev/urandom")
_LINKS = {
    "bin": "usr/bin", "sbin": "usr/bin", "usr/sbin": "bin", "dev/fd": "/proc/self/fd",
    "dev/stdin": "/proc/self/fd/0", "dev/stdout": "/proc/self/fd/1", "dev/stderr": "/proc/self/fd/2",
}  # fmt: skip
_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: Any) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    _call("mount", source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode() or None)


def _read_only(source: str, target: str) -> None:
    """Mount a file or folder of the host, read-only; the flags that it has already cannot be taken away."""
    _mount(source, target, "", _BIND)
    kept = os.statvfs(target).f_flag & (_RDONLY | _NOSUID | _NODEV | _NOEXEC | 1024 | 2048 | 4096)
    flags = {1024: 1024, 2048: 2048, 4096: 1 << 21}  # noatime, nodiratime, relatime: other numbers than mount's
    times = sum(flags[bit] for bit in flags if kept & bit)
    device = stat.S_ISCHR(os.stat(target).st_mode)
    mine = _NOSUID if device else _NOSUID | _NODEV
    _mount("", target, "", _BIND | _REMOUNT | _RDONLY | (kept & 15) | times | mine)


def _leave_keyring() -> None:
    """Take an empty session keyring: that of the caller may hold Kerberos tickets, and goes through all namespaces."""
    machine = os.uname().machine
    if machine not in _KEYCTL:
        raise OSError(errno.ENOSYS, f"keyctl has no known number on {machine}")
    if _libc.syscall(_KEYCTL[machine], 1, None) < 0 and ctypes.get_errno() not in (errno.ENOSYS, errno.EPERM):
        raise OSError(ctypes.get_errno(), "keyctl")  # EPERM: no keyctl works here, neither in the sandbox


def _user(inside: int) -> None:
    """Become an ordinary user in a user namespace of its own, in which its number is another one."""
    _leave_keyring()
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
        _libc.prctl(4, 1, 0, 0, 0)  # dumpable again, to write its own map
    uid, gid = os.getuid(), os.getgid()
    _call("unshare", _NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{inside} {uid} 1"), ("gid_map", f"{inside} {gid} 1")):
        number = os.open(f"/proc/self/{name}", os.O_WRONLY)
        os.write(number, text.encode())
        os.close(number)


def _put(path: str, text: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(text)
    os.chmod(path, 0o755)


def _root(run: dict[str, Any]) -> None:
    """Build the file system and enter it."""
    _mount("none", "/", "", _REC | _PRIVATE)
    root = "/tmp"
    _mount("tmpfs", root, "tmpfs", _NOSUID | _NODEV, "size=16m,nr_inodes=4096,mode=755")
    for name in _FOLDERS:
        os.makedirs(f"{root}/{name}")
    links = {name: os.readlink(f"/{name}") for name in _LIBRARIES if os.path.islink(f"/{name}")}
    for name, target in {**_LINKS, **links}.items():
        os.symlink(target, f"{root}/{name}")
    for name in _LIBRARIES:
        if name not in links and os.path.isdir(f"/{name}"):
            os.makedirs(f"{root}/{name}", exist_ok=True)
            _read_only(f"/{name}", f"{root}/{name}")
    for source, target in [*((f"/{name}", f"/{name}") for name in _DEVICES), *run["binds"]]:
        _put(root + target, "")
        _read_only(source, root + target)
    _mount("proc", f"{root}/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
    with open(f"{root}/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")  # in one of its own, the script would have all capabilities again
    with contextlib.suppress(OSError), open(f"{root}/proc/sys/kernel/shmmni", "w") as file:
        file.write("0")  # no limit of a process counts such memory; older kernels allow this to root alone
    _call("pivot_root", root.encode(), f"{root}/.old".encode())
    os.chdir("/")
    _call("umount2", b"/.old", 2)
    os.rmdir("/.old")
    for path, text in run["files"].items():  # only now: no link of the sandbox leads outside any more
        with contextlib.suppress(OSError):  # a path that is a folder by now
            _put(path, text)
    for path, target in run["links"].items():
        if not os.path.lexists(path):
            os.symlink(target, path)


def _start(run: dict[str, Any]) -> NoReturn:
    """Become the command, without capabilities and with limits."""
    os.setsid()
    nothing = os.open("/dev/null", os.O_RDWR)
    errors = os.open("/.sandbox/stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number, source in ((0, nothing), (1, nothing), (2, errors)):
        os.dup2(source, number)
    os.closerange(3, 256)
    for name, value in {**_LIMITS, resource.RLIMIT_CPU: run["processor"]}.items():
        most = resource.getrlimit(name)[1]
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(name, (value, value))
    for capability in range(64):
        _libc.prctl(24, capability, 0, 0, 0)  # the bounding set
    _call("prctl", 38, 1, 0, 0, 0)  # no new privileges
    os.makedirs(run["folder"], exist_ok=True)
    os.chdir(run["folder"])
    os.execve(run["argv"][0], run["argv"], run["env"])


def _records() -> dict[str, str]:
    """Return the files that were recorded. A link or a pipe in their place is no record."""
    found: dict[str, str] = {}
    left = _MOST
    for name in [*(f"{RECORDS}/{each}" for each in os.listdir(RECORDS)), "/.sandbox/stderr"]:
        with contextlib.suppress(OSError), open(name, "rb", 0, opener=_no_link) as file:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode) and left > 0:
                data = file.read(min(left, 1 << 20))
                left -= len(data)
                found[os.path.basename(name)] = data.decode("utf-8", errors="surrogateescape")
    return found


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _init(run: dict[str, Any], out: int) -> NoReturn:
    """Process 1 of the sandbox: it ends everything at the time limit, and hands out the records."""
    _libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # ends with the process outside, and with it all others
    _libc.sethostname(run["host"].encode(), len(run["host"]))
    _root(run)
    _libc.prctl(4, 0, 0, 0, 0)  # nobody reads its memory or traces it
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the kernel keeps from process 1 what it has no handler for
    child = os.fork()
    if child == 0:
        try:
            _start(run)
        finally:
            os._exit(126)
    end, code, children = time.monotonic() + run["seconds"], None, True
    while children and time.monotonic() < end:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            children = False
            continue
        if pid == child:
            code, end = os.waitstatus_to_exitcode(status), min(end, time.monotonic() + 1)
        elif pid == 0:
            time.sleep(0.002)
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    answer = json.dumps({"code": code, "ended": code is not None and code >= 0, "records": _records()}).encode("utf-8")
    while answer:
        answer = answer[os.write(out, answer) :]
    os._exit(0)


def _one(run: dict[str, Any]) -> dict[str, Any]:
    """Return what one run recorded."""
    reading, writing = os.pipe()
    middle = os.fork()
    if middle == 0:
        try:
            os.close(reading)
            _libc.prctl(1, signal.SIGKILL, 0, 0, 0)
            signal.alarm(int(run["seconds"]) + 3)  # out of the script's reach, unlike process 1's clock
            _call("unshare", _SPACES)
            first = os.fork()
            if first == 0:
                _init(run, writing)
            os.waitpid(first, 0)
        except OSError as error:
            os.write(writing, json.dumps({"error": str(error)}).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        text = file.read()
    os.waitpid(middle, 0)
    return dict(json.loads(text)) if text else {"error": "the sandbox died"}


def main() -> None:
    """Read the runs, and write what each recorded."""
    _libc.prctl(1, signal.SIGKILL, 0, 0, 0)
    runs = json.load(sys.stdin)
    try:
        _user(runs[0]["user"] if runs else 1)
        _libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # which a change of the user takes away
        answers: list[dict[str, Any]] = []
        for run in runs:  # after one that does not end, the others would only take time
            over = bool(answers) and not answers[-1].get("ended")
            answers.append({"error": "a run before it did not end"} if over else _one(run))
    except OSError as error:
        answers = [{"error": str(error)}]
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
