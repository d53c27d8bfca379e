"""Can this machine run the cluster at all? Each check says what is missing."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from . import debian
from .errors import ClusterUnavailable
from .variant import variant

# What running a cluster takes, and the packages that it is in.
TOOLS = {
    "unshare": "util-linux", "nsenter": "util-linux", "pivot_root": "util-linux", "mount": "mount",
    "ip": "iproute2", "tc": "iproute2",
}  # fmt: skip
NAMESPACES = ["unshare", "--mount", "--uts", "--ipc", "--net", "--pid", "--fork"]
NOBODY = 65534


def check_machine(state_base: Path) -> None:
    """Raise ClusterUnavailable, with the reason, where a cluster cannot run on this machine."""
    if os.geteuid() != 0:
        raise ClusterUnavailable("the test cluster needs root (namespaces, mounts, other users' processes)")
    debian.ensure_tools(TOOLS)
    attempt([*NAMESPACES, "true"], "cannot make namespaces")
    for kind in ("overlay", "fuse"):
        check_file_system(kind)
    check_user_namespaces()
    check_cgroups()
    make_room_for_neighbours()
    check_overlay(state_base)


def attempt(command: list[str], complaint: str, user: int | None = None) -> None:
    """Run a probe; its failure is the reason."""
    done = subprocess.run(command, capture_output=True, text=True, user=user)
    if done.returncode != 0:
        raise ClusterUnavailable(f"{complaint}: {done.stderr.strip()}")


def check_file_system(kind: str) -> None:
    """The kernel must know the file system; one that is a module may not be loaded yet."""

    def known() -> bool:
        return kind in Path("/proc/filesystems").read_text().split()

    if not known() and shutil.which("modprobe"):
        subprocess.run(["modprobe", kind], capture_output=True)
    if not known():
        raise ClusterUnavailable(f"the kernel has no {kind} file system")


def check_user_namespaces() -> None:
    """Apptainer, installed without setuid, builds and runs in user namespaces that an ordinary user makes."""
    complaint = "an ordinary user cannot make user namespaces, which Apptainer needs"
    attempt(["unshare", "--user", "--map-root-user", "--mount", "true"], complaint, user=NOBODY)


def check_cgroups() -> None:
    """A cluster that tracks processes by cgroups gives its hosts groups of the machine's controllers, version 1."""
    if variant().cgroups and not Path("/sys/fs/cgroup/freezer/tasks").exists():
        raise ClusterUnavailable("this machine has no cgroup v1 (freezer), which the variant cgroups needs")


def make_room_for_neighbours() -> None:
    """Let every host know every other one's address: the kernel counts these entries for all namespaces together."""
    for name, entries in (("gc_thresh2", 8192), ("gc_thresh3", 16384)):
        limit = Path("/proc/sys/net/ipv4/neigh/default", name)
        if variant().nodes > 3 and int(limit.read_text()) < entries:
            try:
                limit.write_text(f"{entries}\n")
            except OSError as error:
                raise ClusterUnavailable(
                    f"{limit} is too small for {variant().nodes} nodes: {error.strerror}"
                ) from error


def check_overlay(state_base: Path) -> None:
    """The hosts' disks are upper folders in `state_base`: not every file system can hold one."""
    state_base.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=state_base, prefix=".probe-") as folder:
        parts = [Path(folder, name) for name in ("lower", "upper", "work", "root")]
        for part in parts:
            part.mkdir()
        lower, upper, work, root = parts
        mount = f"mount -t overlay -o lowerdir={lower},upperdir={upper},workdir={work} overlay {root}"
        attempt(
            ["unshare", "--mount", "sh", "-c", f"{mount} && touch {root}/file"],
            f"no overlay mount with an upper folder in {state_base}",
        )
