"""Nodes, GPUs, ranks and cores: what the job asks for, what the partition has, and whether the two fit."""

from __future__ import annotations

from slurmddp.errors import UserError
from slurmddp.plan.model import Layout, Note
from slurmddp.plan.ranks import is_auto, plan_ranks, takes_whole_nodes, threads_wanted
from slurmddp.spec.resolve import Resolved
from slurmddp.spec.site import Partition
from slurmddp.spec.types import memory, slurm_time


def partition_of(resolved: Resolved) -> Partition:
    """The profile's entry for the job's partition; an empty one where the profile knows nothing of it."""
    return resolved.site.partitions.get(resolved.job.resources.partition or "", Partition.model_construct())


def plan_layout(resolved: Resolved, allocation: tuple[int, int | None] | None = None) -> tuple[Layout, list[Note]]:
    """Raises UserError for what the partition, or the allocation that we are in (nodes, cores on each), cannot give."""
    wanted, partition, notes = resolved.job.resources, partition_of(resolved), []
    _check_nodes(resolved, allocation)
    gpus = _gpus(resolved, partition)
    ranks, told = plan_ranks(resolved, gpus)
    notes += told
    _check_limits(resolved, partition)
    if ranks is None:
        return _uneven(resolved, partition, gpus, allocation), notes
    most = partition.gpus_per_node
    part_of_node = gpus / most if gpus and most else 1.0
    cpus = _cpus(resolved, partition, part_of_node, allocation)
    nodes = wanted.node_range.max
    if most and gpus and gpus < most and nodes > 1:
        notes += _fewer_nodes(nodes, gpus, most)
    if cpus is None and resolved.site.scheduler == "slurm" and not wanted.exclusive:
        text = "the profile does not know how many cores a node has: Slurm may give one; set resources.cpus_per_node"
        notes.append(Note("warning", text))
    # A step of an allocation gets the allocation's memory where the job itself says nothing.
    mem = None if allocation else partition.mem_per_node and int(partition.mem_per_node * part_of_node)
    threads = max(1, (cpus or ranks) // ranks)
    return Layout(nodes, gpus, ranks, cpus, wanted.mem_per_node or mem, threads), notes


def _uneven(resolved: Resolved, partition: Partition, gpus: int, allocation: tuple[int, int | None] | None) -> Layout:
    """Nodes that may differ: of what the job does not say, each gives all it has, or what Slurm gives by default."""
    wanted, nodes = resolved.job.resources, resolved.job.resources.node_range.max
    _cpus(resolved, partition, 1.0, allocation)  # for its refusals
    if gpus and (wanted.node_range.min < nodes or wanted.node_range.spares):
        raise UserError(
            "ranks_per_node: auto takes the GPUs of the whole allocation: no attempt could begin on fewer nodes",
            where=resolved.place("resources", "nodes"),
            todo="a plain number of nodes, or the number of ranks per node",
        )
    if gpus and allocation is not None and nodes < allocation[0]:
        raise UserError(
            f"ranks_per_node: auto takes all GPUs of the allocation that we are in, which has {allocation[0]} nodes",
            where=resolved.place("resources", "ranks_per_node"),
            todo=f"--nodes {allocation[0]}, or the number of ranks per node",
        )
    whole = takes_whole_nodes(resolved, gpus) and allocation is None
    mem = wanted.mem_per_node or (0 if whole else None)
    threads = 1 if gpus else threads_wanted(resolved.job)
    return Layout(nodes, gpus, None, wanted.cpus_per_node, mem, threads)


def _check_nodes(resolved: Resolved, allocation: tuple[int, int | None] | None) -> None:
    wanted = resolved.job.resources.node_range
    nodes, all_nodes = wanted.max, wanted.max + wanted.spares
    if resolved.site.scheduler == "local" and all_nodes > 1:
        raise UserError(
            f"site {resolved.site.name} is this one machine, not {all_nodes} nodes",
            where=resolved.place("resources", "nodes"),
            todo="more ranks on it: --set resources.ranks_per_node=N",
        )
    if allocation is not None and (wanted.min < nodes or wanted.spares):
        raise UserError(
            "inside an allocation the number of nodes is fixed: min, max and spares are for a job that is submitted",
            where=resolved.place("resources", "nodes"),
            todo=f"--nodes {min(nodes, allocation[0])}",
        )
    if allocation is not None and nodes > allocation[0]:
        raise UserError(
            f"the allocation that we are in has {allocation[0]} node(s), the job wants {nodes}",
            where=resolved.place("resources", "nodes"),
            todo=f"salloc --nodes={nodes} ..., or --nodes {allocation[0]}",
        )


def _cpus(
    resolved: Resolved, partition: Partition, part_of_node: float, allocation: tuple[int, int | None] | None
) -> int | None:
    """Cores on each node: as wanted, else the GPUs' share of the node, and no more than the allocation has."""
    wanted, most = resolved.job.resources.cpus_per_node, partition.cpus_per_node
    given = allocation[1] if allocation else None
    for limit, owner in ((most, _named(resolved)), (given, "the allocation that we are in")):
        if wanted and limit and wanted > limit:
            raise UserError(
                f"{wanted} cores per node are more than the {limit} of {owner}",
                where=resolved.place("resources", "cpus_per_node"),
                todo=f"at most {limit}",
            )
    share = max(1, int(most * part_of_node)) if most else given
    return wanted or (min(share, given) if share and given else share)


def _gpus(resolved: Resolved, partition: Partition) -> int:
    wanted = resolved.job.resources.gpus_per_node
    place = resolved.place("resources", "gpus_per_node")
    if resolved.site.gpu_vendor == "none":
        if wanted:
            raise UserError(f"site {resolved.site.name} has no GPUs", where=place, todo="gpus_per_node: 0")
        return 0
    if wanted is None and is_auto(resolved):
        return 0 if partition.gpus_per_node == 0 else 1
    if wanted is None:
        if partition.gpus_per_node is None:
            raise UserError(
                f"the profile of site {resolved.site.name} does not know how many GPUs a node of this partition has",
                where=place,
                todo="--gpus N, or resources.gpus_per_node in the job file (0: run on CPUs)",
            )
        return partition.gpus_per_node
    if partition.gpus_per_node is not None and wanted > partition.gpus_per_node:
        raise UserError(
            f"{wanted} GPUs per node are more than the {partition.gpus_per_node} of {_named(resolved)}",
            where=place,
            todo=f"at most {partition.gpus_per_node}, and more nodes",
        )
    return wanted


def _check_limits(resolved: Resolved, partition: Partition) -> None:
    wanted = resolved.job.resources
    mem = wanted.mem_per_node
    if mem and partition.mem_per_node and mem > partition.mem_per_node:
        raise UserError(
            f"{memory(mem)} of memory a node are more than the {memory(partition.mem_per_node)} of {_named(resolved)}",
            where=resolved.place("resources", "mem_per_node"),
            todo=f"at most {memory(partition.mem_per_node)}",
        )
    if wanted.time and partition.max_time and wanted.time > partition.max_time:
        raise UserError(
            f"{slurm_time(wanted.time)} is above the limit {slurm_time(partition.max_time)} of {_named(resolved)}",
            where=resolved.place("resources", "time"),
            todo="ask for less time; the run can be continued with --resume",
        )
    nodes = wanted.node_range
    if partition.max_nodes and nodes.max + nodes.spares > partition.max_nodes:
        spares = f" (with {nodes.spares} spare)" if nodes.spares else ""
        raise UserError(
            f"{nodes.max + nodes.spares} nodes{spares} are more than the {partition.max_nodes}"
            f" that {_named(resolved)} allows a job",
            where=resolved.place("resources", "nodes"),
            todo=f"at most {partition.max_nodes}",
        )


def _fewer_nodes(nodes: int, gpus: int, most: int) -> list[Note]:
    """Whether the same GPUs, `gpus` on each of `nodes`, fit on fewer nodes that have `most` each."""
    total = nodes * gpus
    enough = -(-total // most)
    if enough == nodes:
        return []
    return [
        Note(
            "note",
            f"{total} GPUs fit on {enough} node{'s' if enough > 1 else ''} of {most}: fewer nodes are faster"
            f" than {gpus} a node, gradients then cross the network less",
        )
    ]


def _named(resolved: Resolved) -> str:
    return f"partition {resolved.job.resources.partition} of site {resolved.site.name}"
