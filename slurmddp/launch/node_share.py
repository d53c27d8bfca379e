"""Cores and memory of a job whose user and site profile name none: its GPUs' share of a node, as Slurm counts it."""

from typing import Any, NamedTuple

from slurmddp.cluster.describe import Node
from slurmddp.job.document import Key
from slurmddp.job.plan.layout import partition_of
from slurmddp.job.plan.model import Note
from slurmddp.job.plan.ranks import is_auto
from slurmddp.job.resolve import SLURM_LAYER, Resolved
from slurmddp.job.types import memory
from slurmddp.launch.job_check.cluster import Cluster

#: Options in sbatch_extra by which a user chooses nodes, cores or GPUs: then nobody else knows the share.
_CHOSEN = frozenset((
    "-p", "--partition", "-w", "--nodelist", "-F", "--nodefile", "-C", "--constraint", "--reservation", "-M",
    "--clusters",
    "-c", "--cpus-per-task", "--cpus-per-gpu", "--exclusive", "-G", "--gpus", "--gpus-per-node", "--gpus-per-task",
    "--gpus-per-socket", "--gres", "--mem", "--mem-per-cpu", "--mem-per-gpu", "-n", "--ntasks", "--ntasks-per-node",
))  # fmt: skip
_SOURCE = "scontrol show node"


class _Share(NamedTuple):
    cpus: int
    memory: int
    gpus: int
    node: str


def with_share(resolved: Resolved, cluster: Cluster | None = None) -> tuple[Resolved, list[Note]]:
    """Return the job with its GPUs' share of the cores and memory of a node, and what was taken from where.

    Nothing is asked, or changed, if the user or the profile says how many cores, or if the job has no GPUs. If nodes
    differ, the smallest share is taken, which each of them can give.
    """
    resources, partition, rejected = resolved.job.resources, partition_of(resolved), resolved.site.unsupported_flags
    gpus = partition.gpus_per_node if resources.gpus_per_node is None else resources.gpus_per_node
    chosen = any(extra.split("=")[0] in _CHOSEN for extra in resources.sbatch_extra)
    known = resources.cpus_per_node or partition.cpus_per_node
    if not resolved.site.queues or not gpus or known or chosen or is_auto(resolved):
        return resolved, []
    cluster = cluster or Cluster()
    shares = _shares(resolved, gpus, cluster)
    if shares is None:
        return resolved, [Note("warning", f"Slurm did not say what a node has ({'; '.join(cluster.silent)})")]
    if not shares:
        return resolved, [Note("warning", f"Slurm shows no node with {gpus} such GPUs that this job could get")]
    least = min(shares, key=lambda share: share.cpus)
    values: dict[str, Any] = {"cpus_per_node": least.cpus}
    mem = min(share.memory for share in shares)
    # 1 MiB is Slurm's default where nobody has written how much a node has.
    if mem > 1 and resources.mem_per_node is None and partition.mem_per_node is None and "--mem" not in rejected:
        values["mem_per_node"] = mem
    part = "all" if resources.exclusive else f"{gpus} of {least.gpus} GPUs"
    text = f"{least.cpus} cores" + (f" and {memory(mem)} of memory" if len(values) > 1 else "") + " per node"
    message = f"asks for {text}: {part} of {least.node} ({_SOURCE}); resources.cpus_per_node overrides it"
    keys: dict[Key, Any] = {("resources", key): value for key, value in values.items()}
    return resolved.laid(keys, SLURM_LAYER, f"{_SOURCE}: {part} of {least.node}"), [Note("note", message)]


def _shares(resolved: Resolved, gpus: int, cluster: Cluster) -> list[_Share] | None:
    """Return the share of each node that the job could get, of those that are up if there are any; None if unknown."""
    resources, ask = resolved.job.resources, partition_of(resolved).ask
    names = (ask.get("partition") if ask is not None else resources.partition) or ""
    nodes, rows = cluster.all_nodes, [cluster.partition(name) for name in (names.split(",") if names else [None])]
    if nodes is None or cluster.partitions is None:
        return None
    features = {
        feature for feature in ((ask or {}).get("constraint"), resources.constraint) if feature and feature.isalnum()
    }
    shares = []
    for node in nodes:
        limits = [row for row in rows if row and row["PartitionName"] in node.partitions]
        have = _gpus(node, resources.gpu_type)
        if limits and have >= gpus and features <= set(node.features):
            cpus = min(cluster.cpus(node, row) for row in limits)
            mem = min(cluster.memory(node, row) for row in limits)
            taken = have if resources.exclusive else gpus
            if cpus:
                shares.append((node, _Share(max(1, cpus * taken // have), mem * taken // have, have, node.name)))
    up = [share for node, share in shares if node.usable]
    return up or [share for _, share in shares]


def _gpus(node: Node, kind: str | None) -> int:
    return sum(count for name, count in node.gpus.items() if kind is None or name.lower() == kind.lower())
