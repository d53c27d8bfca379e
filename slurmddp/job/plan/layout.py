"""GPUs, cores and memory of each node: what the job asks for, what the partition has, and whether the two fit."""

from fnmatch import fnmatchcase

from slurmddp.errors import UserError
from slurmddp.job.conditions import holding
from slurmddp.job.plan.model import Allocation, Layout, NodePlan, Note
from slurmddp.job.plan.ranks import is_auto, threads_wanted
from slurmddp.job.resolve import Resolved
from slurmddp.job.site import Partition
from slurmddp.job.types import memory, slurm_time


def partition_of(resolved: Resolved) -> Partition:
    """The profile's entry for the job's partition, with the limits that hold for this job; an empty one where the
    profile knows nothing of it."""
    partition = resolved.site.partitions.get(resolved.job.resources.partition or "", Partition.model_construct())
    limits = {
        key: limit
        for _, entry in holding(resolved.site, resolved.job)
        for key in ("max_time", "max_nodes")
        if (limit := getattr(entry, key)) is not None
    }
    return partition.model_copy(update=limits) if limits else partition


def plan_layout(
    resolved: Resolved, nodes: NodePlan, gpus: int, allocation: Allocation | None
) -> tuple[Layout, list[Note]]:
    """`gpus`: per node, as `gpus_per_node` found them.

    Raises UserError for what the partition, or the current allocation, cannot give.
    """
    resources, partition = resolved.job.resources, partition_of(resolved)
    notes = _doubtful_account(resolved, partition)
    _check_limits(resolved, partition)
    if nodes.ranks_per_node is None:
        return _of_uneven_nodes(resolved, nodes, gpus, allocation), notes
    most = partition.gpus_per_node
    part_of_node = gpus / most if gpus and most else 1.0
    cpus = _cpus(resolved, partition, part_of_node, allocation)
    if most and gpus and gpus < most and nodes.max > 1:
        notes += _fewer_nodes(nodes.max, gpus, most)
    if cpus is None and resolved.site.queues and not resources.exclusive:
        text = "the site profile has no cores per node, so Slurm may give only one: set resources.cpus_per_node"
        notes.append(Note("warning", text))
    # A step of an allocation gets the allocation's memory where the job itself says nothing.
    unasked = allocation is not None or (partition.mem_per_node == 0 and part_of_node < 1)
    mem = None if unasked else partition.mem_per_node and int(partition.mem_per_node * part_of_node)
    threads = max(1, (cpus or nodes.ranks_per_node) // nodes.ranks_per_node)
    return Layout(gpus, cpus, resources.mem_per_node or mem, threads), notes


def _of_uneven_nodes(resolved: Resolved, nodes: NodePlan, gpus: int, allocation: Allocation | None) -> Layout:
    """Nodes that may differ: of what the job does not say, each gives all it has, or what Slurm gives by default."""
    resources = resolved.job.resources
    _cpus(resolved, partition_of(resolved), 1.0, allocation)  # for its refusals
    mem = resources.mem_per_node or (0 if nodes.whole and allocation is None else None)
    threads = 1 if gpus else threads_wanted(resolved.job)
    return Layout(gpus, resources.cpus_per_node, mem, threads)


def _cpus(resolved: Resolved, partition: Partition, part_of_node: float, allocation: Allocation | None) -> int | None:
    """Cores on each node: as wanted, else the GPUs' share of the node, and no more than the allocation has."""
    count, most = resolved.job.resources.cpus_per_node, partition.cpus_per_node
    given = allocation.cpus_per_node if allocation else None
    for limit, owner in ((most, named_partition(resolved)), (given, "the current allocation")):
        if count and limit and count > limit:
            raise UserError(
                f"{count} cores per node are more than the {limit} of {owner}",
                where=resolved.location("resources", "cpus_per_node"),
                todo=f"at most {limit}",
            )
    share = max(1, int(most * part_of_node)) if most else given
    return count or (min(share, given) if share and given else share)


def gpus_per_node(resolved: Resolved) -> int:
    """GPUs per node, with `ranks_per_node: auto` at least. Raises UserError where the partition has fewer, or where
    nobody says how many there are."""
    count, partition = resolved.job.resources.gpus_per_node, partition_of(resolved)
    location = resolved.location("resources", "gpus_per_node")
    if resolved.site.gpu_vendor == "none":
        if count:
            here = "no GPU was found on this machine" if not resolved.site.queues else None
            todo = "set gpus_per_node to 0"
            raise UserError(here or f"site {resolved.site.name} has no GPUs", where=location, todo=todo)
        return 0
    if count is None and is_auto(resolved):
        return 0 if partition.gpus_per_node == 0 else 1
    if count is None:
        if partition.gpus_per_node is None:
            raise _unknown_gpus(resolved)
        return partition.gpus_per_node
    if partition.gpus_per_node is not None and count > partition.gpus_per_node:
        raise UserError(
            f"{count} GPUs per node are more than the {partition.gpus_per_node} of {named_partition(resolved)}",
            where=location,
            todo=f"ask for at most {partition.gpus_per_node} per node"
            + (", and for more nodes" if resolved.site.queues else ""),
        )
    return count


def _unknown_gpus(resolved: Resolved) -> UserError:
    """Return the error for a job whose GPUs per node neither it nor the profile's partition says."""
    name, site = resolved.job.resources.partition, resolved.site
    todo = "use --gpus-per-node N, or resources.gpus_per_node in the job file (0: train on CPUs)"
    if not site.partitions or name in site.partitions:
        text = f"the profile of site {site.name} does not say how many GPUs per node this partition has"
        return UserError(text, where=resolved.location("resources", "gpus_per_node"), todo=todo)
    wrong = "no partition is set" if name is None else f"the profile of site {site.name} has no partition {name}"
    return UserError(
        wrong,
        where=resolved.location("resources", "partition"),
        todo=f"use one of {', '.join(site.partitions)}; for another one, {todo}",
    )


def _check_limits(resolved: Resolved, partition: Partition) -> None:
    resources = resolved.job.resources
    mem, partition_name = resources.mem_per_node, named_partition(resolved)
    if mem and partition.mem_per_node and mem > partition.mem_per_node:
        raise UserError(
            f"{memory(mem)} of memory per node are more than the {memory(partition.mem_per_node)} of {partition_name}",
            where=resolved.location("resources", "mem_per_node"),
            todo=f"ask for at most {memory(partition.mem_per_node)}",
        )
    if resources.time and partition.max_time and resources.time > partition.max_time:
        raise UserError(
            f"{slurm_time(resources.time)} is above the limit {slurm_time(partition.max_time)} of {partition_name}"
            f"{limited_by(resolved, 'max_time')}",
            where=resolved.location("resources", "time"),
            todo="ask for less time; --resume can continue the run later",
        )


def _doubtful_account(resolved: Resolved, partition: Partition) -> list[Note]:
    account, pattern = resolved.job.resources.account, partition.account
    if account is None or pattern is None or fnmatchcase(account, pattern):
        return []
    text = f"account {account} does not look like one for {named_partition(resolved)}: those are {pattern}"
    return [Note("warning", text)]


def _fewer_nodes(nodes: int, gpus: int, most: int) -> list[Note]:
    """Return whether the same GPUs, `gpus` on each of `nodes`, fit on fewer nodes that have `most` each."""
    total = nodes * gpus
    enough = -(-total // most)
    if enough == nodes:
        return []
    fit = f"{total} GPUs fit on {enough} node{'s' if enough > 1 else ''} of {most}"
    return [Note("note", f"{fit}: using {gpus} per node sends more gradients over the network, which is slower")]


def limited_by(resolved: Resolved, key: str) -> str:
    """Return which entry of `when` sets the limit, as messages name it; empty where the partition's own holds."""
    names = [name for name, entry in holding(resolved.site, resolved.job) if getattr(entry, key) is not None]
    return f" (when.{names[-1]} of its profile)" if names else ""


def named_partition(resolved: Resolved) -> str:
    """The job's partition, as messages name it."""
    if not resolved.site.queues:
        return "this machine"
    return f"partition {resolved.job.resources.partition} of site {resolved.site.name}"
