"""What the live cluster and this login node say, before anything is submitted."""

from __future__ import annotations

import datetime
import os
import platform
import re
import shutil
from collections.abc import Collection, Mapping
from typing import NamedTuple

from slurmddp.cluster.client import ask
from slurmddp.cluster.describe import Node
from slurmddp.cluster.duration import limit_of
from slurmddp.container import SIF_PROGRAMS
from slurmddp.errors import ExternalError, UserError
from slurmddp.job.types import is_name
from slurmddp.launch.job_check.cluster import Cluster

PARTITION = "scontrol show partition"
#: Modules that a profile may load: container runtimes, and what brings them, or the GPUs' libraries.
_MODULES = re.compile(r"apptainer|singularity|cuda|rocm|nccl|rccl|pytorch|aws-ofi|enroot", re.IGNORECASE)
_FOLDERS = re.compile(r"[A-Z0-9_]*(SCRATCH|WORK|PROJECT|STORE|DATA)[A-Z0-9_]*")
_SECONDS = 20.0


class Login(NamedTuple):
    """What this host has. runtimes: name -> what it says about itself; modules: those that a profile may load;
    folders: variables that name folders."""

    host: str
    interfaces: tuple[str, ...]
    runtimes: Mapping[str, str]
    pyxis: bool
    modules: tuple[str, ...]
    folders: Mapping[str, str]


class NodeType(NamedTuple):
    """Nodes that are alike for Slurm: cores, memory, GPUs, features."""

    nodes: tuple[Node, ...]

    @property
    def node(self) -> Node:
        """Return one of them: one that is free if possible."""
        free = [node for node in self.nodes if node.usable and "IDLE" in node.states]
        return [*free, *(node for node in self.nodes if node.usable), *self.nodes][0]

    @property
    def shape(self) -> tuple[object, ...]:
        """Return what they have in common: the same in each partition that has such nodes."""
        node = self.nodes[0]
        return (node.architecture, node.cpus, node.memory, node.gres, node.features)

    def inside(self, partition: str) -> NodeType:
        """Return those of them that are in a partition."""
        return NodeType(tuple(node for node in self.nodes if partition in node.partitions))

    def __str__(self) -> str:
        node = self.node
        gres = f", {node.gres}" if node.gpus else ""
        return f"{len(self.nodes)} x {node.cpus} CPUs, {node.memory}M{gres}"


class Live(NamedTuple):
    """All that was asked. partitions: the fields of those to describe; left_out: name -> why it is not described."""

    date: str
    config: Mapping[str, str]
    partitions: Mapping[str, Mapping[str, str]]
    left_out: Mapping[str, str]
    nodes: tuple[Node, ...]
    cluster: Cluster
    login: Login

    def types(self, partition: str | None = None) -> list[NodeType]:
        """Return the kinds of nodes of a partition, or of all that are described."""
        partitions = {partition} if partition else set(self.partitions)
        alike: dict[tuple[object, ...], list[Node]] = {}
        for node in self.nodes:
            if partitions & set(node.partitions):
                alike.setdefault(NodeType((node,)).shape, []).append(node)
        return [NodeType(tuple(nodes)) for nodes in alike.values()]

    def partition_of(self, kind: NodeType) -> str:
        """Return the partition in which to use such nodes: one where a node is up, the default one if possible."""
        having = [name for name in self.partitions if kind.inside(name).nodes]
        having = [name for name in having if kind.inside(name).node.usable] or having
        return next((name for name in having if self.partitions[name].get("Default") == "YES"), having[0])

    @property
    def gpu_request(self) -> str | None:
        """Return how jobs ask for GPUs; None where Slurm does not say. --gpus-per-node needs cons_tres."""
        select = self.config.get("SelectType")
        return select and ("gpus-per-node" if "cons_tres" in select else "gres")

    def max_time(self, row: Mapping[str, str]) -> tuple[int | None, str]:
        """Return the partition's limit in seconds, or that of its QOS if it is lower, and the command that told it."""
        limits = [(limit_of(row.get("MaxTime")), PARTITION)]
        if row.get("QoS", "N/A") not in ("N/A", "(null)"):
            limits.append((self.cluster.qos_limits.get(row["QoS"]), f"sacctmgr show qos {row['QoS']}"))
        known = [(wall, command) for wall, command in limits if wall]
        return min(known) if known else (None, "")


def look(only: Collection[str], environment: Mapping[str, str], cluster: Cluster | None = None) -> Live:
    """Ask Slurm and this host. only: partitions to describe, all where it is empty.

    Raises UserError where there is no Slurm, or no such partition, ExternalError where Slurm does not answer.
    """
    if shutil.which("scontrol", path=environment.get("PATH")) is None:
        todo = "run this on a login node of the cluster (some need `module load slurm`)"
        raise UserError("no Slurm on this machine: scontrol is not in PATH", todo=todo)
    cluster = cluster or Cluster()
    config, rows, nodes = cluster.config, cluster.partitions, cluster.all_nodes
    if config is None or rows is None or nodes is None:
        raise ExternalError("Slurm's commands did not answer:\n" + "\n".join(cluster.silent))
    if unknown := sorted(set(only) - set(rows)):
        todo = f"use one of: {', '.join(rows)}"
        raise UserError(f"Slurm knows no partition {unknown[0]}", where="--partition", todo=todo)
    left_out = {name: reason for name, row in rows.items() if (reason := _left_out(name, row, only))}
    described = {name: row for name, row in rows.items() if name not in left_out}
    today = datetime.date.today().isoformat()
    return Live(today, config, described, left_out, tuple(nodes), cluster, _login(environment))


def _left_out(name: str, row: Mapping[str, str], only: Collection[str]) -> str | None:
    if only and name not in only:
        return "not in --partition"
    if row.get("State", "UP") != "UP":
        return f"its State is {row['State']}"
    if row.get("RootOnly") == "YES":
        return "only root may use it"
    return None if is_name(name) else "its name cannot be a key of a profile"


def _login(environment: Mapping[str, str]) -> Login:
    path = environment.get("PATH")
    # The first that is found is used: `singularity` is often a link to apptainer.
    runtimes = [name for name in SIF_PROGRAMS if shutil.which(name, path=path)]
    return Login(
        host=platform.node(),
        interfaces=_interfaces(_said("ip", "-o", "-4", "addr", "show")),
        runtimes={name: (_said(name, "--version").splitlines() or [name])[0] for name in runtimes},
        pyxis="--container-image" in _said("srun", "--help"),
        modules=_modules(_said("bash", "-lc", "type module >/dev/null 2>&1 && module -t avail 2>&1")),
        folders={
            name: value
            for name, value in sorted(environment.items())
            if _FOLDERS.fullmatch(name) and value.startswith("/") and os.path.isdir(value)
        },
    )


def _interfaces(text: str) -> tuple[str, ...]:
    """Return `name address/bits` of each interface but the loopback, from the output of ip."""
    interfaces = re.findall(r"^\d+:\s+(\S+)\s+inet (\S+)", text, re.MULTILINE)
    return tuple(f"{name} {address}" for name, address in interfaces if name != "lo")


def _modules(text: str) -> tuple[str, ...]:
    """Return the modules of interest in the output of `module -t avail`, whose lines may also be folders."""
    words = (re.sub(r"\(.*\)$", "", line.strip()) for line in text.splitlines())
    return tuple(sorted({word for word in words if _MODULES.search(word) and not word.endswith((":", "/"))}))


def _said(*command: str) -> str:
    """Return what a program prints; an empty text if it is not here, fails or takes too long."""
    try:
        return ask(command, timeout=_SECONDS).out
    except ExternalError:
        return ""
