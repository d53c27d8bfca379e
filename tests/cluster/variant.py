"""Which cluster the tests run on: $SLURMDDP_CLUSTER_VARIANT names one of VARIANTS; without it, the usual one."""

import os
from dataclasses import dataclass
from pathlib import Path

from .errors import ClusterUnavailable

VARIABLE = "SLURMDDP_CLUSTER_VARIANT"

DEBIAN = (
    "slurmctld", "slurmd", "slurm-client", "munge",
    "python3", "python3-venv",
    "slurmdbd", "mariadb-server-core", "mariadb-client-core",
    "iproute2", "iputils-ping", "procps", "less", "nano-tiny", "git", "curl", "rsync",
)  # fmt: skip
APPTAINER = ("apptainer", "squashfuse", "fakeroot")


@dataclass(frozen=True)
class Variant:
    """What differs from one cluster to the next. As default: Slurm 24.11 on three nodes, no cgroups."""

    suites: tuple[str, ...] = ("trixie", "sid")  # Apptainer is in sid only; everything else comes from trixie
    python: str = "3.13"
    apptainer: bool = True
    cgroups: bool = False  # whether Slurm tracks a job's processes by cgroups (v1)
    cgroup_plugin: str = "disabled"  # what its cgroup.conf says where they are not tracked so
    nodes: int = 3

    @property
    def packages(self) -> tuple[str, ...]:
        """Of the hosts' root."""
        return DEBIAN + (APPTAINER if self.apptainer else ())


VARIANTS = {
    "": Variant(),
    # Debian 12: its libc is too old for Apptainer, and its Slurm does not know CgroupPlugin=disabled.
    "slurm-22.05": Variant(suites=("bookworm",), python="3.11", apptainer=False, cgroup_plugin="cgroup/v1"),
    "slurm-26.05": Variant(suites=("sid",), python="3.14"),
    "cgroups": Variant(cgroups=True),
    "64-nodes": Variant(nodes=64),
}


def name() -> str:
    """The variant's name; "" is the usual cluster."""
    return os.environ.get(VARIABLE, "")


def variant() -> Variant:
    """What $SLURMDDP_CLUSTER_VARIANT asks for."""
    if name() not in VARIANTS:
        raise ClusterUnavailable(f"{VARIABLE}={name()}: there are {', '.join(filter(None, VARIANTS))}")
    return VARIANTS[name()]


def configure(slurm: Path) -> None:
    """Change the folder that the hosts see as /etc/slurm."""
    made_of = variant()
    plugin = "cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup" if made_of.cgroups else made_of.cgroup_plugin
    (slurm / "cgroup.conf").write_text(f"CgroupPlugin={plugin}\n")
    path = slurm / "slurm.conf"
    text = path.read_text()
    if "bookworm" in made_of.suites:
        text = text.replace("PreemptParameters=send_user_signal", "SlurmctldParameters=preempt_send_user_signal")
    if made_of.cgroups:
        text = text.replace("proctrack/linuxproc", "proctrack/cgroup")
    if made_of.nodes > 3:
        text = text.replace("node[1-3]", f"node[1-{made_of.nodes}]")
        text += f"NodeName=node[4-{made_of.nodes}] CPUs=4 RealMemory=6000 State=UNKNOWN\n"
    path.write_text(text)
