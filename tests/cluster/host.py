"""One host of the cluster: started in namespaces of its own, and entered to run a command."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from . import accounting, network
from .build import Parts
from .errors import ClusterError
from .process import ProcessId, kill_tree
from .roots import CHECKOUT, USERS
from .state import Layout
from .variant import configure, variant

HERE = Path(__file__).resolve().parent
CONTROLLER, LOGIN = "ctl", "login"
NODES = tuple(f"node{number}" for number in range(1, variant().nodes + 1))
ADDRESSES = {
    CONTROLLER: "10.77.0.2", LOGIN: "10.77.0.3",
    **{name: f"10.77.0.{number}" for number, name in enumerate(NODES, start=11)},
}  # fmt: skip
# Of /scratch, the small file system that all hosts share: a test can fill it.
SCRATCH_SIZE = "128m"
USER_IDS = {"root": 0, **USERS}


def start_fabric(layout: Layout) -> tuple[ProcessId, subprocess.Popen[str]]:
    """Start the process that holds the cluster's network, /scratch and outer PID namespace: with it, all dies."""
    layout.scratch.mkdir()
    mount = 'mount -t tmpfs -o "$1" scratch "$0" && shift && exec "$@"'
    command = [
        "unshare",
        "--mount",
        "--net",
        "--pid",
        "--fork",
        "--",
        "bash",
        "-c",
        mount,
        str(layout.scratch),
        f"mode=1777,size={SCRATCH_SIZE}",
        sys.executable,
        "-I",
        str(HERE / "host_init.py"),
        "fabric",
    ]
    process, init = start_init(command, layout.folder / "fabric.log")
    network.make_bridge(init.pid)
    return init, process


def start_host(name: str, fabric: ProcessId, layout: Layout, parts: Parts) -> tuple[ProcessId, subprocess.Popen[str]]:
    """Boot a host on its disk, kept from an earlier boot; its daemons start by themselves."""
    disk = layout.disk(name)
    for folder in ("upper", "work", "root"):
        (disk / folder).mkdir(parents=True, exist_ok=True)
    network.disconnect(fabric.pid, name)
    command = [
        "nsenter",
        "--target",
        str(fabric.pid),
        "--mount",
        "--pid",
        "--",
        "unshare",
        "--mount",
        "--uts",
        "--ipc",
        "--net",
        "--pid",
        "--fork",
        "--",
        "bash",
        str(HERE / "host_setup.sh"),
        name,
        str(parts.host_root),
        str(disk),
        str(layout.shared),
        str(CHECKOUT),
        str(parts.image_roots),
        str(parts.login_venv),
        f"{cgroup_of(layout)}/{name}" if variant().cgroups else "",
    ]
    process, init = start_init(command, layout.log(name))
    network.connect(fabric.pid, name, init.pid, ADDRESSES[name])
    assert process.stdin is not None
    process.stdin.write("the network is there\n")
    process.stdin.close()
    return init, process


def cgroup_of(layout: Layout) -> str:
    """Below each controller of the machine's: what the hosts of this cluster have as /sys/fs/cgroup."""
    return f"slurmddp-{layout.folder.name}"


def remove_cgroups(layout: Layout) -> None:
    """The cluster's groups, once nothing is in them."""
    for top in Path("/sys/fs/cgroup").glob(f"*/{cgroup_of(layout)}"):
        for folder, _, _ in os.walk(top, topdown=False):
            os.rmdir(folder)


def start_init(command: Sequence[str], log: Path) -> tuple[subprocess.Popen[str], ProcessId]:
    """Start a namespace's init, which says its pid in the first line it prints."""
    with log.open("a") as errors:
        # A session of its own: Ctrl-C in the terminal must not reach the cluster.
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    assert process.stdout is not None
    with process.stdout as output:
        line = output.readline().strip()
    if not line:
        raise ClusterError(f"{command[-1]}: its init said no pid; {log} says:\n{log.read_text()}")
    return process, ProcessId.of(int(line))


def entry(init: ProcessId, argv: Sequence[str], user: str, cwd: str | None, env: Mapping[str, str]) -> list[str]:
    """The command that runs `argv` in a host as a login would: that user, nothing of our environment but which
    supervisor tests ask for, and no signal ignored, which tests in the background or under nohup would hand down."""
    home = "/root" if user == "root" else f"/home/{user}"
    path = "/usr/local/bin:/usr/bin:/bin" + (":/usr/local/sbin:/usr/sbin:/sbin" if user == "root" else "")
    login = {
        "HOME": home,
        "USER": user,
        "LOGNAME": user,
        "SHELL": "/bin/bash",
        "PATH": path,
        "LANG": "C.UTF-8",
    }
    return [
        "nsenter", "--target", str(init.pid), "--mount", "--uts", "--ipc", "--net", "--pid", "--",
        "/usr/bin/setpriv", "--reuid", user, "--regid", user, "--init-groups", "--",
        "/usr/bin/env", "-i", "--default-signal", *(f"{name}={value}" for name, value in {**login, **env}.items()),
        "/bin/sh", "-c", 'umask 022; cd -- "$0" && exec "$@"', cwd or home, *argv,
    ]  # fmt: skip


def run_entered(command: Sequence[str], stdin: str | None, timeout: float | None) -> subprocess.CompletedProcess[str]:
    """Run an entry command to its end; when its time is up, nothing of it stays behind in the host."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",  # a list of processes may show bytes that are no UTF-8
    )
    try:
        out, err = process.communicate(stdin, timeout)
    except BaseException:  # a timeout or Ctrl-C: both go on from here, but not before the host is clean
        kill_tree(process.pid)
        process.wait()
        # Not read to their end: a daemon that the command left behind may hold the streams open.
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def user_id(parts: Parts, name: str) -> int:
    """The number of a user of the hosts' own."""
    users = dict(line.split(":")[::2][:2] for line in (parts.host_root / "etc/passwd").read_text().splitlines())
    return int(users[name])


def write_shared(layout: Layout, parts: Parts, munge_key: bytes, with_accounting: bool) -> None:
    """Lay out what all hosts share: names, Slurm's configuration, munge's key, the users' homes."""
    shared = layout.shared
    layout.home.mkdir(parents=True)
    shutil.copytree(HERE / "etc", shared / "slurm")
    configure(shared / "slurm")
    if with_accounting:
        accounting.configure(shared / "slurm", user_id(parts, "slurm"))
    names = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in ADDRESSES.items())]
    (shared / "hosts").write_text("\n".join([*names, f"{network.BRIDGE_ADDRESS} fabric"]) + "\n")
    (shared / "munge.key").write_bytes(munge_key)
    (shared / "munge.key").chmod(0o400)
    for user, number in USERS.items():
        home = layout.home / user
        shutil.copytree(parts.host_root / "etc/skel", home)
        for path in [home, *home.rglob("*")]:
            shutil.chown(path, number, number)
        home.chmod(0o755)
