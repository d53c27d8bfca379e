"""Partition, nodes, accounts: what this cluster would not give, by what its Slurm says."""

from collections.abc import Iterator

from slurmddp.cluster.duration import limit_of
from slurmddp.job.plan.layout import partition_of
from slurmddp.job.plan.model import Plan
from slurmddp.job.plan.recovery import BESIDE_THE_SAVE
from slurmddp.job.types import memory, slurm_time
from slurmddp.launch.job_check.cluster import limit
from slurmddp.launch.job_check.rule import Hit, Subject, rule


def option(plan: Plan, name: str) -> str | None:
    """Return the value of an sbatch option of the job; None in an allocation, which Slurm has granted."""
    return (
        None
        if plan.inside
        else next((each.partition("=")[2] for each in plan.sbatch if each.startswith(f"--{name}=")), None)
    )


def _partition(subject: Subject) -> dict[str, str] | None:
    """Return Slurm's fields of the job's partition; None where the site chooses it, by a constraint or a QOS."""
    plan, resolved = subject.prepared.plan, subject.prepared.resolved
    chosen = option(plan, "partition") is None and partition_of(resolved).ask is not None
    if not plan.queued or chosen:
        return None
    return subject.cluster.partition(option(plan, "partition"))


@rule
def partition_unknown(subject: Subject) -> Iterator[Hit]:
    name = option(subject.prepared.plan, "partition")
    rows = subject.cluster.partitions if name else None
    for one in name.split(",") if name and rows else ():
        if rows and one not in rows:
            known = ", ".join(sorted(rows)[:12])
            yield Hit(subject.where("resources.partition"), f"Slurm knows no partition {one}", f"use one of: {known}")


@rule
def partition_closed(subject: Subject) -> Iterator[Hit]:
    row = _partition(subject)
    if row and row.get("State", "UP") != "UP":
        yield Hit(subject.where("resources.partition"), f"partition {row['PartitionName']} is {row['State']}")


@rule
def partition_limit(subject: Subject) -> Iterator[Hit]:
    row, plan = _partition(subject), subject.prepared.plan
    if row is None:
        return
    name, most = row["PartitionName"], limit_of(row.get("MaxTime"))
    if plan.job.resources.time and most and plan.job.resources.time > most:
        message = (
            f"the time limit {slurm_time(plan.job.resources.time)} is above the {slurm_time(most)} of partition {name}"
        )
        yield Hit(subject.where("resources.time"), message, f"ask for --time {slurm_time(most)} or less")
    most = min(filter(None, (limit(row.get("MaxNodes")), limit(row.get("TotalNodes")))), default=None)
    least = plan.nodes.min if plan.nodes.elastic else plan.nodes.total
    if most is not None and least > most:
        message = f"{least} nodes are more than the {most} that partition {name} gives one job"
        yield Hit(subject.where("resources.nodes"), message, "ask for fewer nodes, or use another partition")


@rule
def time_default(subject: Subject) -> Iterator[Hit]:
    row = _partition(subject)
    default = limit_of(row.get("DefaultTime")) if row else None
    if row and default and not subject.prepared.plan.job.resources.time:
        message = f"no time limit is set: partition {row['PartitionName']} ends the job after {slurm_time(default)}"
        yield Hit(subject.where("resources.time"), message)


@rule
def stop_lead(subject: Subject) -> Iterator[Hit]:
    prepared = subject.prepared
    lead, save, beside = prepared.plan.stop_lead, prepared.resumed.longest_save, BESIDE_THE_SAVE
    if lead and save and lead < save + beside:
        text = f"ranks get {lead} s before the time limit, and the longest save of the resumed runs took {save:.0f} s"
        yield Hit(subject.where("timeouts.stop"), text, f"set timeouts.stop to {2 * save + beside:.0f} or more")


@rule
def partition_account(subject: Subject) -> Iterator[Hit]:
    row, plan = _partition(subject), subject.prepared.plan
    if row is None:
        return
    for key, allowed, denied in (("account", "AllowAccounts", "DenyAccounts"), ("qos", "AllowQos", "DenyQos")):
        value = option(plan, key)
        if value is None:
            continue
        open_to, closed_to = row.get(allowed, "ALL").split(","), row.get(denied, "").split(",")
        if (open_to != ["ALL"] and value not in open_to) or value in closed_to:
            rest = f"use one of: {', '.join(open_to)}" if open_to != ["ALL"] else "use another one"
            message = f"partition {row['PartitionName']} does not accept {key} {value}"
            yield Hit(subject.where(f"resources.{key}"), message, rest)


@rule
def account_unknown(subject: Subject) -> Iterator[Hit]:
    account = option(subject.prepared.plan, "account")
    rows = subject.cluster.accounts if account else None
    if rows is not None and account not in (known := sorted({row.account for row in rows})):
        message = f"you have no association with account {account}"
        yield Hit(subject.where("resources.account"), message, f"use one of: {', '.join(known)}")


@rule
def qos_limit(subject: Subject) -> Iterator[Hit]:
    plan, cluster = subject.prepared.plan, subject.cluster
    qos, account = option(plan, "qos"), option(plan, "account")
    if qos is None:
        return
    rows = [row for row in cluster.accounts or () if account in (None, row.account)]
    given = sorted({name for row in rows for name in row.qos})
    if given and qos not in given:
        yield Hit(subject.where("resources.qos"), f"you may not use QOS {qos}", f"use one of: {', '.join(given)}")
    most = cluster.qos_limits.get(qos)
    if plan.job.resources.time and most and plan.job.resources.time > most:
        message = f"the time limit {slurm_time(plan.job.resources.time)} is above the {slurm_time(most)} of QOS {qos}"
        yield Hit(subject.where("resources.time"), message, f"ask for --time {slurm_time(most)} or less")


@rule
def node_size(subject: Subject) -> Iterator[Hit]:
    row, layout = _partition(subject), subject.prepared.plan.layout
    kinds = subject.cluster.nodes(row["PartitionName"]) if row else None
    if row is None or not kinds:
        return
    name, cpus, size = row["PartitionName"], max(each.cpus for each in kinds), max(each.memory for each in kinds)
    if layout.cpus_per_node and layout.cpus_per_node > cpus:
        message = f"{layout.cpus_per_node} cores per node are more than the {cpus} that nodes of partition {name} have"
        yield Hit(subject.where("resources.cpus_per_node"), message, f"ask for {cpus} or fewer")
    if layout.mem_per_node and layout.mem_per_node > size:
        message = f"{memory(layout.mem_per_node)} per node is more than the {memory(size)} of nodes of partition {name}"
        yield Hit(subject.where("resources.mem_per_node"), message, f"ask for {size}M or less, or 0 for all of a node")
    yield from _gpus(subject, name, [each.gpus() for each in kinds])


def _gpus(subject: Subject, partition: str, kinds: list[dict[str, int]]) -> Iterator[Hit]:
    gpus, where = subject.prepared.plan.layout.gpus_per_node, subject.where("resources.gpus_per_node")
    if not gpus:
        return
    most = max(sum(each.values()) for each in kinds)
    if most == 0:
        message = f"nodes of partition {partition} have no GPUs that Slurm knows (sinfo -o %G)"
        yield Hit(where, message, "use a partition with GPUs; if the site asks in another way, set gpu_request: none")
    elif gpus > most:
        yield Hit(where, f"{gpus} GPUs per node are more than the {most} of partition {partition}", f"ask for {most}")
    job = subject.prepared.resolved
    kind = job.job.resources.gpu_type or (partition_of(job).gpu_type if job.site.gpu_request_type else None)
    known = sorted({name for each in kinds for name in each if name})
    if kind and known and kind not in known:
        message = f"partition {partition} has no GPU type {kind}"
        yield Hit(subject.where("resources.gpu_type"), message, f"use one of: {', '.join(known)}")


@rule
def slurm_refuses(subject: Subject) -> Iterator[Hit]:
    plan = subject.prepared.plan
    if plan.queued:
        trial = subject.cluster.trial(plan.sbatch)
        if trial is not None and trial.refusal is not None:
            yield Hit("sbatch --test-only", trial.refusal)
