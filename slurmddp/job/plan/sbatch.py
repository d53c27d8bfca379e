"""The #SBATCH options, in the form that this site takes."""

from slurmddp.errors import UserError
from slurmddp.job.plan.layout import partition_of
from slurmddp.job.plan.model import Layout, NodePlan, RecoveryPlan
from slurmddp.job.plan.ranks import asks_itself
from slurmddp.job.resolve import Resolved
from slurmddp.job.types import slurm_time

#: The signal that comes ahead of the time limit. NCCL has taken USR1 (nccl#704).
STOP_SIGNAL = "USR2"

#: One batch script on `nodes` nodes with one task each, its output in the run folder: the job breaks without.
_OURS = frozenset(
    f"--{name}"
    for name in (
        *("nodes", "ntasks", "ntasks-per-node", "array", "wrap", "parsable", "test-only", "wait"),
        *("output", "error", "open-mode", "export", "chdir", "signal"),
        *("requeue", "no-requeue", "no-kill"),
    )
)
_GPU_FLAGS = ("--gres", "--gpus-per-node")


def plan_sbatch(
    resolved: Resolved, nodes: NodePlan, layout: Layout, recovery: RecoveryPlan, stop_lead: int | None
) -> tuple[str, ...]:
    """Raises UserError for a flag that the site rejects."""
    resources, site = resolved.job.resources, resolved.site
    unsupported = set(site.unsupported_flags)
    partition = partition_of(resolved)
    ask = dict(partition.ask) if partition.ask is not None else {"partition": resources.partition}
    # The key of `resources` that asks for a flag: what a user wants and a site rejects is not dropped in silence.
    options: list[tuple[str, str, str | int | None]] = [
        ("--job-name", "", resolved.job.name),
        # A range lets Slurm begin with fewer; spares are the nodes above those that train.
        ("--nodes", "", f"{nodes.min}-{nodes.total}" if nodes.elastic else nodes.total),
        # One task a node is Slurm's default. With this flag, Slurm 22.05 gives no more than the least of a range.
        ("--ntasks-per-node", "", None if nodes.elastic else "1"),
        ("--cpus-per-task", "cpus_per_node", layout.cpus_per_node),
        *_gpu_request(resolved, nodes, layout),
        ("--mem", "mem_per_node", f"{layout.mem_per_node}M" if layout.mem_per_node else layout.mem_per_node),  # 0: all
        ("--time", "time", slurm_time(resources.time) if resources.time else None),
        ("--partition", "partition", ask.get("partition")),
        ("--account", "account", resources.account),
        ("--qos", "qos", resources.qos or ask.get("qos")),
        ("--constraint", "constraint", "&".join(filter(None, (ask.get("constraint"), resources.constraint))) or None),
        ("--exclusive", "exclusive", "" if resources.exclusive or nodes.whole else None),
    ]
    for flag, key, _ in options:
        if flag in unsupported and key and getattr(resources, key):
            raise _rejected(resolved, flag, "resources", key)
    lines = [f"{flag}={value}" if value != "" else flag for flag, _, value in options if value is not None]
    # A chained job is a new one: Slurm must not bring this one back as well.
    again = "--requeue=expedite" if recovery.expedite else "--requeue"
    lines += [again if recovery.requeue == "requeue" else "--no-requeue", "--open-mode=append"]
    lines += ["--no-kill"] if nodes.elastic else []
    lines += [f"--signal=B:{STOP_SIGNAL}@{stop_lead}"] if stop_lead else []
    for index, extra in enumerate(resources.sbatch_extra):
        flag = extra.split("=")[0]
        if flag in unsupported:
            raise _rejected(resolved, flag, "resources", "sbatch_extra", str(index))
        if flag in _OURS or (flag in _GPU_FLAGS and any(line.startswith(f"{flag}=") for line in lines)):
            raise UserError(
                f"{flag} is set by slurmddp itself, and the job relies on it",
                where=resolved.location("resources", "sbatch_extra", str(index)),
                todo="remove it; resources.*, recovery.requeue and timeouts.stop control it",
            )
        lines.append(extra)
    return tuple(line for line in lines if line.split("=")[0] not in unsupported)


def _gpu_request(resolved: Resolved, nodes: NodePlan, layout: Layout) -> list[tuple[str, str, str | int | None]]:
    """One task a node sees all its GPUs: --gpus-per-task would isolate them and break NCCL's P2P (nccl#1066)."""
    site, resources = resolved.site, resolved.job.resources
    if not layout.gpus_per_node or site.gpu_request == "none" or (nodes.world is None and asks_itself(resolved)):
        return []
    kind = resources.gpu_type or (partition_of(resolved).gpu_type if site.gpu_request_type else None)
    count = f"{kind}:{layout.gpus_per_node}" if kind else str(layout.gpus_per_node)
    if site.gpu_request == "gres":
        return [("--gres", "", f"gpu:{count}")]
    return [("--gpus-per-node", "", count)]


def missing_settings(resolved: Resolved) -> list[UserError]:
    """An error for each setting that the site requires of a job and this one lacks: `submit` refuses such a job."""
    missing = []
    for dotted in resolved.site.required:
        value: object = resolved.job
        for part in dotted.split("."):
            value = getattr(value, part, None)
        if value is None:
            known = f"--{dotted.removeprefix('resources.')} VALUE"
            option = known if dotted.startswith("resources.") else f"--set {dotted}=VALUE"
            error = UserError(
                f"{dotted} is not set, and site {resolved.site.name} requires it",
                todo=f"set {dotted} in the job file or your configuration, or pass {option}",
            )
            missing.append(error)
    return missing


def _rejected(resolved: Resolved, flag: str, *key: str) -> UserError:
    todo = "remove it"
    return UserError(f"site {resolved.site.name} rejects jobs with {flag}", where=resolved.location(*key), todo=todo)
