"""Keeps a job off the nodes that recent runs of its site found bad: sbatch --exclude."""

import time
from collections.abc import Sequence
from typing import NamedTuple

from slurmddp.cluster.client import ask
from slurmddp.errors import ExternalError
from slurmddp.launch.prepare import Prepared
from slurmddp.run.bad_nodes import BadNode, bad_nodes
from slurmddp.shared.units import clock

#: At most this part of a partition's nodes, but one: a wrong judgement must not take a cluster away.
_PART = 10
_SECONDS = 20.0
_SHOWN = 3
_LIST = "`slurmddp site bad-nodes` lists them"
#: The user has chosen nodes, or a part of the cluster of which nobody knows how many nodes are left.
_CHOSEN = ("--nodelist", "--nodefile", "--reservation", "--clusters")


class Avoided(NamedTuple):
    """options: for sbatch, which takes the last --exclude; warnings: which nodes, and why."""

    options: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def avoid(prepared: Prepared) -> Avoided:
    """Return what keeps this job off bad nodes. Slurm is asked only if there are any."""
    plan, site = prepared.plan, prepared.resolved.site
    if not plan.queued:
        return Avoided()
    now = time.time()
    bad = bad_nodes(site.name, site.exclude_bad_nodes_for, now)
    if not bad or "--exclude" in site.unsupported_flags:
        return Avoided()
    excluded = _values(plan.sbatch, "--exclude")
    if _values(plan.sbatch, *_CHOSEN) or any("/" in value for value in excluded):  # a file of names is not a list
        return Avoided((), (f"the job chooses its nodes itself, so bad nodes are not excluded: {_LIST}",))
    there = _nodes(",".join(_values(plan.sbatch, "--partition")))
    if there is None:
        return Avoided((), (f"sinfo does not list the nodes, so bad nodes are not excluded: {_LIST}",))
    known = [each for each in bad if each.node in there]
    most = max(0, min(max(1, len(there) // _PART), len(there) - plan.nodes.total))
    chosen = known[:most]
    warnings = [_line(each, now) for each in chosen[:_SHOWN]]
    if len(chosen) > _SHOWN:
        warnings.append(f"{len(chosen) - _SHOWN} more bad nodes are excluded: {_LIST}")
    if len(known) > most:
        limit = f"{most} of the {len(there)} nodes" if most else f"the job needs all {len(there)} nodes"
        warnings.append(f"{len(known) - most} bad nodes are not excluded ({limit}): {_LIST}")
    if not chosen:
        return Avoided((), tuple(warnings))
    return Avoided((f"--exclude={','.join([*excluded, *(each.node for each in chosen)])}",), tuple(warnings))


def _line(bad: BadNode, now: float) -> str:
    source = f"run {bad.run}, " if bad.run else ""
    todo = f"`slurmddp site bad-nodes --forget {bad.node}` allows it again"
    return f"node {bad.node} is excluded: {bad.reason} ({source}{clock(now - bad.time)} ago); {todo}"


def _values(lines: Sequence[str], *flags: str) -> list[str]:
    """Return the values of these #SBATCH options."""
    return [value for flag, _, value in (line.partition("=") for line in lines) if flag in flags]


def _nodes(partitions: str) -> set[str] | None:
    """Return the nodes of the partitions, or of the default one if none is named; None if Slurm does not say."""
    try:
        answer = ask(("sinfo", "--noheader", "--Node", "--format=%N %P"), timeout=_SECONDS)
    except ExternalError:
        return None
    rows = [line.split() for line in answer.out.splitlines() if line.count(" ") == 1]
    names = partitions.split(",") if partitions else ()
    nodes = {node for node, name in rows if (name.rstrip("*") in names if names else name.endswith("*"))}
    return nodes if answer.code == 0 and nodes else None
