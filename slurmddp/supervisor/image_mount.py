"""Starts Apptainer on an image that is mounted beforehand, so that signals do not end the mount.

Apptainer without setuid mounts a .sif by squashfuse, a process of the same job step. Slurm sends the SIGTERM of
scancel, requeues and preemption to all processes of a step: squashfuse ends by it, and the ranks by SIGBUS before their
last save. Apptainer resets its child's signal mask and handlers, so whoever starts Apptainer cannot protect that child.

Here, a process mounts the image in a user namespace of its own, with squashfuse that ignores those signals, and this
one enters that namespace and becomes Apptainer, with the mount for its image. The mount is seen in that namespace
only. It is gone once its processes are: the one that mounts waits for the end of this one.
"""

import ctypes
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from typing import Dict, Iterable, List, NamedTuple, Sequence

from slurmddp.records import json_lines
from slurmddp.records.events import Event
from slurmddp.records.rank_events import ImageNotProtected
from slurmddp.supervisor.ranks import environment

#: What Slurm and users send to a step. libfuse sets a handler only where the signal is not ignored.
_SIGNALS = (
    signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGTERM,
    signal.SIGTSTP, signal.SIGXCPU,
)  # fmt: skip
#: What Python ignores, and a program that it becomes would ignore, too.
_OF_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
#: linux/sched.h, sys/mount.h (read-only, nosuid, nodev), sys/prctl.h
_NEW_MOUNTS, _NEW_USER, _READ_ONLY, _ON_PARENTS_DEATH = 0x00020000, 0x10000000, 1 | 2 | 4, 1
#: The descriptor that python.sh has opened.
_OF_STARTER = 9
#: Options of Apptainer with which it does not mount the image, or needs more of the user namespace than it has here.
_OTHER_WAYS = ("--unsquash", "--fakeroot", "-f")

# SIF (sylabs/sif, pkg/sif/sif.go): in the header the number of descriptors that there may be, and where they begin; in
# a descriptor its type, whether it is used, its data's offset, and for a partition, file system and kind.
_TABLE, _DESCRIPTOR = struct.Struct("<88xqq"), struct.Struct("<i?12xq176xii376x")
_PARTITION, _SQUASHFS, _PRIMARY, _DATA = 0x4004, 1, 2, 3


class NotPossible(Exception):
    """The image cannot be mounted here. The text says why."""


class Mount(NamedTuple):
    """How to mount an image. command: of Apptainer, with the mount for its image. words: how many of them are its own,
    before the program in the container.
    """

    squashfuse: str
    image: str
    offset: int
    point: str
    command: Sequence[str]
    words: int


def partition(image: str) -> int:
    """Return where the file system begins in an image that is nothing but one; 0 in a file of another kind. Raises
    NotPossible for a .sif with more than that.
    """
    found = []
    with open(image, "rb") as file:
        head = file.read(128)
        if head[32:42] != b"SIF_MAGIC\0" or len(head) < 128:
            return 0
        total, begin = _TABLE.unpack_from(head)
        file.seek(begin)
        table = file.read(min(total, 1000) * _DESCRIPTOR.size)
    for number in range(len(table) // _DESCRIPTOR.size):
        data, used, offset, system, kind = _DESCRIPTOR.unpack_from(table, number * _DESCRIPTOR.size)
        if used and data == _PARTITION and kind != _DATA:
            found.append((kind, system, offset))
    if len(found) != 1 or found[0][:2] != (_PRIMARY, _SQUASHFS):
        raise NotPossible("the image is not one plain squashfs partition")
    return int(found[0][2])


def squashfuse_of(executable: str) -> str:
    """Return what this Apptainer would mount a .sif with; empty if the kernel mounts it, or this is no Apptainer."""
    if os.getuid() == 0:
        return ""
    try:
        done = subprocess.run([executable, "buildcfg"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    except OSError:
        return ""
    lines = done.stdout.decode("utf-8", "replace").split("\n")
    folders = [line.partition("=")[2] + "/apptainer/bin" for line in lines if line.startswith("LIBEXECDIR=")]
    if not folders or not os.path.exists(folders[0] + "/starter") or os.path.exists(folders[0] + "/starter-suid"):
        return ""
    path = ":".join([*folders, os.environ.get("PATH", ""), "/usr/local/bin:/usr/bin:/bin"])
    found = shutil.which("squashfuse_ll", path=path) or shutil.which("squashfuse", path=path)
    if not found:
        raise NotPossible("neither squashfuse_ll nor squashfuse is on this node")
    return found


def enter(mount: Mount) -> None:
    """Have the image mounted, and enter the namespaces in which it is. Raises NotPossible, OSError."""
    here, me = os.getcwd(), os.getpid()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _serve(mount, write, me)
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as answers:
        answer = answers.read().decode("utf-8", "replace")
    if answer != "mounted":
        os.waitpid(child, 0)
        raise NotPossible(answer or "the process that mounts it was killed")
    for kind in ("user", "mnt"):
        namespace = os.open("/proc/{}/ns/{}".format(child, kind), os.O_RDONLY | os.O_CLOEXEC)
        _call("setns", namespace, 0)
        os.close(namespace)
    os.chdir(here)  # another namespace begins at its root


def _serve(mount: Mount, write: int, main: int) -> None:
    """Mount the image, say so, and end squashfuse once `main` has ended."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    os.setpgid(0, 0)
    os.chdir("/")
    try:
        _show("slurmddp: mounts " + mount.image)
    except (OSError, ValueError):
        pass  # a kernel that lets nobody write there: then it looks like a second Apptainer
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in (0, 1, 2, write):
            _close(int(name))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # a reader of the step's output does not wait for this process
        os.dup2(nowhere, descriptor)
    try:
        server = _mount(mount)
        _try_out(mount)
    except Exception as error:  # noqa: BLE001 - whatever it is, Apptainer can still mount the image itself
        os.write(write, "{}".format(error or type(error).__name__).encode("utf-8", "replace"))
        return
    os.write(write, b"mounted")
    os.close(write)
    # Not by PR_SET_PDEATHSIG: for that, a Go program's thread that exits is a parent that dies.
    while os.getppid() == main and server.poll() is None:
        time.sleep(0.2)
    server.kill()


def _show(text: str) -> None:
    """Have `ps` show this in place of the words of Apptainer's command, by which people and programs find the ranks."""
    with open("/proc/self/stat", "rb") as stat:
        fields = stat.read().rpartition(b")")[2].split()
    begin, end = int(fields[45]), int(fields[46])  # proc(5): arg_start and arg_end
    with open("/proc/self/mem", "r+b", 0) as memory:
        memory.seek(begin)
        memory.write(os.fsencode(text)[: end - begin - 1].ljust(end - begin, b"\0"))


def _mount(mount: Mount) -> "subprocess.Popen[bytes]":
    """Make the namespaces, and mount the image in them."""
    user, group = os.getuid(), os.getgid()
    _call("unshare", _NEW_USER | _NEW_MOUNTS)
    for name, text in (("setgroups", "deny"), ("uid_map", "{0} {0} 1"), ("gid_map", "{1} {1} 1")):
        with open("/proc/self/" + name, "w") as file:
            file.write(text.format(user, group))
    device = os.open("/dev/fuse", os.O_RDWR)
    os.set_inheritable(device, True)
    options = "fd={},rootmode=40000,user_id={},group_id={},allow_other".format(device, user, group)
    point, kind = os.fsencode(mount.point), b"fuse.squashfuse"
    _call("mount", os.fsencode(mount.image), point, kind, ctypes.c_ulong(_READ_ONLY), options.encode())
    known = subprocess.run([mount.squashfuse], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False).stdout
    owner = ",uid={},gid={}".format(user, group) if b"uid=" in known else ""  # as Apptainer does
    words = [mount.squashfuse, "-f", "-o", "ro,offset={}{}".format(mount.offset, owner)]
    server = subprocess.Popen(
        [*words, mount.image, "/dev/fd/{}".format(device)],
        pass_fds=(device,),
        preexec_fn=lambda: _call("prctl", _ON_PARENTS_DEATH, int(signal.SIGKILL)),
    )
    os.close(device)
    try:
        os.listdir(mount.point)  # waits for its first answer; an error if it exits
    except OSError as error:
        code = server.wait()
        raise NotPossible("{} exited with code {}".format(mount.squashfuse, code)) from error
    return server


def _try_out(mount: Mount) -> None:
    """Raise NotPossible if Apptainer does not start with the mount: this host, or its configuration, may refuse it."""
    done = subprocess.run(
        [*mount.command[: mount.words], "true"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=lambda: _reset(_SIGNALS),  # _OF_PYTHON: subprocess does it
        check=False,
    )
    if done.returncode:
        lines = done.stdout.decode("utf-8", "replace").strip().split("\n")
        raise NotPossible("{} refuses the mount: {}".format(mount.command[0], lines[-1]))


def _reset(numbers: Iterable[signal.Signals]) -> None:
    for number in numbers:
        signal.signal(number, signal.SIG_DFL)


def _call(name: str, *arguments: object) -> None:
    """Call a function of the C library. Raises OSError."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, "{}: {}".format(name, os.strerror(number)))


def _close(descriptor: int) -> None:
    try:
        os.close(descriptor)
    except OSError:
        pass  # that of the listing, which is closed already


def _tell(why: str, variables: Dict[str, str]) -> None:
    """Write for `slurmddp status` that signals will end the mount. Once per node and start of the ranks."""
    if variables.get("SLURMDDP_STEP") or variables.get("SLURM_LOCALID", "0") != "0":
        return
    attempt = variables.get("SLURMDDP_ATTEMPT", "")
    number = int(attempt) if attempt.isdigit() else None
    event = Event(ImageNotProtected(why), time.time(), number, node=variables.get("SLURMDDP_NODE"))
    try:
        json_lines.append(variables["SLURMDDP_RUN"] + "/events.jsonl", json_lines.dump(event.write()))
    except (OSError, KeyError) as error:
        print("slurmddp: cannot note that {}: {}".format(why, error), file=sys.stderr)


def main(arguments: Sequence[str]) -> int:
    """Become Apptainer: FOLDER IMAGE COMMAND... FOLDER: for the mount; made if missing."""
    folder, image, *command = arguments
    variables = environment(os.getpid())  # as they came: Python sets LC_CTYPE for itself
    mounted: List[str] = []
    try:
        offset = partition(image) if os.path.isfile(image) and not set(_OTHER_WAYS).intersection(command) else 0
        squashfuse = squashfuse_of(command[0]) if offset else ""
        if squashfuse:
            point = "{}/{}".format(folder, os.path.basename(image))  # Apptainer names the container by it
            os.makedirs(point, exist_ok=True)
            words = command.index(image) + 1
            mounted = [*command[: words - 1], point, *command[words:]]
            enter(Mount(squashfuse, image, offset, point, mounted, words))
    except (NotPossible, OSError) as error:
        mounted = []
        _tell(str(error), variables)
    _close(_OF_STARTER)
    _reset(_OF_PYTHON)
    try:
        os.execvpe((mounted or command)[0], mounted or command, variables)
    except OSError as error:
        print("slurmddp: {}: {}".format(command[0], error.strerror), file=sys.stderr)
        return 127
