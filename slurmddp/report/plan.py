"""`slurmddp check`: the arithmetic of a job, for people."""

import re
import shlex
from collections.abc import Sequence
from typing import Any

from slurmddp.job.document import RUN
from slurmddp.job.plan.batch import ways
from slurmddp.job.plan.layout import partition_of
from slurmddp.job.plan.model import AlertsPlan, Plan
from slurmddp.job.resolve import Resolved
from slurmddp.job.train import Batch, Parallel
from slurmddp.job.types import slurm_time
from slurmddp.report.interval import interval_lines
from slurmddp.shared import batch as dealing
from slurmddp.shared import mesh
from slurmddp.styled import join, labelled

#: So many numbers of nodes are shown, where there may be fewer of them.
SHOWN = 8


def plan_report(plan: Plan, resolved: Resolved) -> str:
    lines = [
        f"{plan.job.name} on {plan.site.title}",
        "",
        *_layout(plan),
        *parallel_lines(plan, resolved.job.parallel),
        *_batch(plan, resolved),
        *_fewer_nodes(plan),
        *interval_lines(plan, resolved.job.checkpoint),
        "",
        *survival_lines(plan),
        "",
        cost_line(plan),
    ]
    lines += [labelled(note.level, note.text) for note in plan.notes]
    return join("\n", lines)


def _layout(plan: Plan) -> list[str]:
    nodes, layout = plan.nodes, plan.layout
    allotted = "as Slurm allots" if plan.site.queues else "all of this machine"
    cores = allotted if layout.cpus_per_node is None else str(layout.cpus_per_node)
    if nodes.world is None:
        each = "GPU that Slurm gives the node" if layout.gpus_per_node else f"{layout.threads_per_rank} of its cores"
        shape = [f"{'ranks':<20}auto: a node starts one for each {each}"]
        threads = "shared by its ranks"
    else:
        unit = "GPUs" if layout.gpus_per_node else "CPU ranks"
        shape = [
            f"{unit + ' per node':<20}{layout.gpus_per_node or nodes.ranks_per_node}",
            f"ranks               {nodes.world} = {nodes.ranks_per_node} per node x {nodes.max}",
        ]
        threads = f"{layout.threads_per_rank} thread(s) per rank"
    return [
        f"nodes               {nodes_text(plan)}",
        *shape,
        f"cores per node      {cores}, {threads}",
        f"program             {program_text(plan)}",
        f"directory           {workdir_text(plan)}",
        f"runs in             {software_text(plan)}",
    ]


def software_text(plan: Plan) -> str:
    """Return what the ranks run in: the image, or the environment that the setup lines activate, or a Python."""
    container = plan.container
    if container.image:
        return f"{container.runtime} {container.image}"
    for line in reversed(plan.job.setup):
        if match := re.fullmatch(
            r"(?:source|\.) '?(.+)/bin/activate'?|(?:conda|mamba) activate '?(.+?)'?", line.strip()
        ):
            kind = "virtual environment" if match[1] else "conda environment"
            return f"{kind} {match[1] or match[2]}, no container"
    return f"{container.python}, no container"


def program_text(plan: Plan) -> str:
    """Return the command that starts the ranks, and where it runs."""
    program = plan.program
    words = program.words(program.script) if program.own else ["-m", "slurmddp.runtime.train"]
    starter = ["torchrun"]
    if plan.srun is not None:
        python = [] if program.bash else [plan.container.python]
        starter = ["srun", f"--ntasks-per-node={plan.srun.ranks_per_node}", *plan.srun.options, *python]
    variables = f", with the variables of {plan.accelerate}" if plan.accelerate else ""
    wrapped = f", each rank behind: {shlex.join(program.wrap)}" if program.wrap else ""
    return f"{shlex.join([*starter, *words])}{variables}{wrapped}"


def workdir_text(plan: Plan) -> str:
    """Return the working directory of the ranks, and what that means for relative paths."""
    if not plan.program.own:
        return plan.workdir or "the run folder"
    if plan.workdir == plan.cwd:
        return f"{plan.cwd}, which runs share (train.workdir: submit)"
    return f"{plan.workdir.replace(RUN, 'RUN_FOLDER')}, where relative paths start (train.workdir)"


def nodes_text(plan: Plan) -> str:
    """Return the number of nodes in words: 4, or 2 to 4 and 1 spare."""
    nodes = plan.nodes
    train = str(nodes.max) if nodes.min == nodes.max else f"{nodes.min} to {nodes.max}, as many as are healthy"
    return train + (f", and {nodes.spares} spare{'s' * (nodes.spares > 1)}" if nodes.spares else "")


def _fewer_nodes(plan: Plan) -> list[str]:
    """Return one line per smaller number of nodes; if there are many, the first and last ones."""
    batch, ranks, tensor = plan.batch, plan.nodes.ranks_per_node, plan.job.parallel.tensor
    counts = list(reversed(plan.nodes.below_max))
    if ranks is None or not counts:
        return []
    lines = ["with fewer nodes (same global batch)" if batch else "with fewer nodes"]
    for nodes in counts if len(counts) <= SHOWN else [*counts[: SHOWN - 1], counts[-1]]:
        line = f"  {nodes} node{'s' * (nodes > 1)} x {ranks} = {nodes * ranks} ranks"
        if batch is not None and batch.accumulation is not None:
            line += f", accumulation {dealing.accumulation(batch.total, batch.micro, nodes * ranks // tensor)}"
            line += "" if dealing.is_even(batch.total, batch.micro, nodes * ranks // tensor) else ", uneven"
        lines.append(line)
    return lines


def _batch(plan: Plan, resolved: Resolved) -> list[str]:
    batch, nodes, layout = plan.batch, plan.nodes.by_tensor(plan.job.parallel.tensor), plan.layout
    if batch is None:
        return ["", "global batch        set by your script (set train.batch to see the arithmetic)"]
    if batch.accumulation is None or nodes.world is None:
        known = "the ranks found" if nodes.world is None else "the largest share"
        follows = f"accumulation follows from {known}"
        line = f"global batch        {batch.total}, micro batch up to {batch.micro}; {follows}"
        return ["", line, *_weights(resolved.job.train.batch)]
    per_node = "tensor groups" if plan.job.parallel.tensor > 1 else "GPUs" if layout.gpus_per_node else "ranks"
    product = (
        f"{batch.micro} (micro batch) x {batch.accumulation} (accumulation)"
        f" x {nodes.ranks_per_node} ({per_node} per node) x {nodes.max} (nodes)"
    )
    lines = ["", f"global batch        {batch.total} = {product}"]
    if not batch.even:
        largest = batch.micro * batch.accumulation * nodes.world
        lines = [
            "",
            f"global batch        {batch.total} of at most {largest} = {product}",
            "                    micro batches are uneven; every sample weighs the same",
        ]
    partition = partition_of(resolved)
    choices = ways(batch, nodes, layout, 1 if not plan.site.queues else partition.max_nodes, partition.gpus_per_node)
    if choices and plan.job.parallel.tensor == 1:
        lines.append("same global batch with")
        for way in choices:
            ranks = way.nodes * way.ranks_per_node
            product = f"{way.nodes} node{'s' * (way.nodes > 1)} x {way.ranks_per_node} = {ranks} ranks"
            lines.append(f"  {way.change:<20}{product}, accumulation {way.accumulation}")
    return lines


def _weights(batch: Batch) -> list[str]:
    """Names are matched on the nodes, where those of the devices are known."""
    if not batch.weights:
        return []
    shown = ", ".join(f"{pattern} {weight:g}" for pattern, weight in batch.weights.items())
    return [f"{'share of a rank':<20}{shown}, all others 1 (patterns match the node or device name)"]


def cost_line(plan: Plan) -> str:
    """Return the maximum GPU-hours, the node-hours of a job without GPUs, or why neither is known."""
    total, gpus = plan.nodes.total, plan.layout.gpus_per_node
    if not plan.site.queues:
        return "cost: this machine, until training is done"
    nodes = f"{total} node{'s' if total > 1 else ''}"
    shape = f"{nodes}, as many as Slurm gives" if plan.nodes.world is None else f"{nodes} x {gpus} GPUs"
    if plan.node_hours is None:
        return f"cost: {shape}, for the partition's default time (resources.time is not set)"
    clock = slurm_time(plan.job.resources.time or 0)
    if plan.gpu_hours is None:
        return f"cost: up to {plan.node_hours:.3g} node-hours ({shape}, x {clock})"
    if not gpus:
        return f"cost: up to {plan.node_hours:.3g} node-hours ({total} x {clock}), no GPUs"
    return f"cost: up to {plan.gpu_hours:.4g} GPU-hours ({shape} x {clock})"


#: Groups of a dimension, and ranks of a group, that are shown before "...".
GROUPS_SHOWN = 4
_MEANING = {
    "FSDP": "all ranks together hold the model",
    "HSDP": "the ranks of a shard group together hold the model",
    "TP": "the ranks of a tensor group together compute each layer",
}


def parallel_lines(plan: Plan, wanted: Parallel) -> list[str]:
    """Return a line for the kind, and one per dimension with more than one rank; none for a script."""
    if plan.program.own:
        return []
    world, per_node = plan.nodes.world, plan.nodes.ranks_per_node
    if world is None or per_node is None:
        shape = f"shard {wanted.shard}" if wanted.replicate is None else f"{wanted.replicate} x {wanted.shard}"
        return [f"{'parallel':<20}{shape}, groups are formed when the job runs"] if wanted.shard > 1 else []
    sizes = mesh.sizes(world, wanted.replicate, wanted.shard, wanted.tensor)
    kind = mesh.kind(sizes)
    if kind == "DDP":
        return [f"{'parallel':<20}DDP: every rank holds the whole model"] if world > 1 else []
    product = " x ".join(f"{name} {size}" for name, size in sizes.items())
    lines = [f"{'parallel':<20}{kind}: {product}, {_MEANING[kind.rpartition('+')[2]]}"]
    for name, groups in mesh.groups(sizes).items():
        if sizes[name] > 1:
            lines.append(f"{name + ' groups':<20}{_listed(groups)} ({_where(groups, per_node)})")
    return lines


def _listed(groups: Sequence[Sequence[int]]) -> str:
    """Return the first groups, and the number of all if there are more."""
    shown = " | ".join(_ranks(group) for group in groups[:GROUPS_SHOWN])
    return shown if len(groups) <= GROUPS_SHOWN else f"{shown} | ... {len(groups)} in all"


def _ranks(group: Sequence[int]) -> str:
    """Ranks of one group, which are evenly spaced: 0-7, or 0,8,16,24, or 0,8,...,504."""
    if len(group) > 2 and group[-1] - group[0] == len(group) - 1:
        return f"{group[0]}-{group[-1]}"
    if len(group) <= GROUPS_SHOWN:
        return ",".join(map(str, group))
    return f"{group[0]},{group[1]},...,{group[-1]}"


def _where(groups: Sequence[Sequence[int]], per_node: int) -> str:
    """Return how many groups stay inside a node of `per_node` consecutive ranks."""
    inside = sum(group[0] // per_node == group[-1] // per_node for group in groups)
    if inside == len(groups):
        return "inside a node" if inside == 1 else "each inside a node"
    if inside == 0:
        return "across nodes" if len(groups) == 1 else "each across nodes"
    return f"{inside} of {len(groups)} inside a node, the others across nodes"


_BACK = {"requeue": "requeued and resumes", "chain": "continued by a new job (this site forbids requeues)"}
#: Of your own script nobody knows whether it resumes.
_OWN_BACK = {"requeue": "requeued", "chain": "followed by a new job (this site forbids requeues)"}
_OWN = "continues if it loads at its start what it saved (docs/frameworks.md); else it begins at step 1 again"
_LEAVE = {"node": "sent by job.sh", "proxy": "sent by job.sh through a proxy", "login": "sent from the login node"}


def survival_lines(plan: Plan) -> list[str]:
    """Return one line per kind of fault. Your own script restarts in the same way, but may not resume."""
    is_script = plan.runtime_job is None
    back = (_OWN_BACK if is_script else _BACK).get(plan.recovery.requeue, "")
    times = f"in place (up to {plan.max_restarts} times)" if plan.max_restarts else "in the next attempt"
    lines = [
        ("a rank dies", f"all ranks restart {times}" + ("" if is_script else ", from the newest checkpoint")),
        ("a node is lost", _lost(plan, back)),
        ("time limit", _time_limit(plan, back)),
        (
            "no progress",
            f"after {plan.job.recovery.no_progress} failed starts in a row at the same step, the run fails",
        ),
    ]
    if plan.srun is not None:
        lines.append(("launch.mode srun", "no restart in place, no signed rendezvous (docs/recovery.md)"))
    if is_script:
        lines.append(("your script", _OWN))
    if not plan.site.queues:
        lines = [line for line in lines if line[0] in ("a rank dies", "no progress", "your script")]
    elif not plan.job.recovery.preflight:
        lines.append(("preflight", "none: recovery.preflight is false"))
    if plan.layout.gpus_per_node:
        lines.append(("GPU hours", _worst_case(plan)))
    return [f"{label:<20}{becomes}" for label, becomes in (*lines, ("alerts", _alerts(plan.alerts, plan)))]


def _lost(plan: Plan, back: str) -> str:
    nodes = plan.nodes
    ends = f"the job is {back}" if back else "the run fails"
    if not nodes.elastic:
        return ends
    instead = ["a spare node replaces it"] if nodes.spares else []
    instead += [f"the run continues on the other nodes (at least {nodes.min})"] if nodes.min < nodes.max else []
    return f"{', then '.join(instead)}; with fewer nodes, {ends}"


def _time_limit(plan: Plan, back: str) -> str:
    save = "ranks save" if plan.runtime_job else "ranks are asked to save"
    save = "no save before it" if plan.stop_lead is None else f"{save} {plan.stop_lead} s before it"
    ends = f"the job is {back} until training is done" if back else "the run stops"
    if not plan.recovery.must_save:
        return f"{save}; then {ends}"
    where = " or ".join(("RUN/checkpoints", *(path.replace(RUN, "RUN") for path in plan.recovery.watch)))
    return f"{save}. If the script saved to {where} in this job, {ends}. If not, the run stops (recovery.requeue)"


def _worst_case(plan: Plan) -> str:
    """Return what all starts of the run may use together, or on what that depends."""
    limit, each = plan.job.recovery.max_gpu_hours, plan.gpu_hours
    if plan.recovery.requeue == "none" and each is not None and (limit is None or each <= limit):
        return f"at most {each:.4g}: nothing requeues the job"
    if limit is not None:
        return f"at most {limit:.4g} for all starts (recovery.max_gpu_hours), then the ranks save and the run stops"
    if plan.recovery.requeue == "none":
        return "no limit is known: set resources.time, or recovery.max_gpu_hours"
    start = "each start uses what its time allows" if each is None else f"up to {each:.4g} per start"
    return f"{start}, for as many starts as training needs: recovery.max_gpu_hours limits all together"


def _alerts(alerts: AlertsPlan | None, plan: Plan) -> str:
    """Return who gets which alerts; Slurm's own mail is among the sbatch options."""
    mail = [line.removeprefix("--mail-type=") for line in plan.sbatch if line.startswith("--mail-type=")]
    told = [f"{target.name} ({', '.join(target.on)})" for target in (alerts.targets if alerts else ()) if target.on]
    told += [f"mail ({mail[0].lower().replace(',', ', ')})"] if mail else []
    if not told:
        return "none (see docs/alerts.md)"
    ways = [_LEAVE[alerts.leave]] if alerts else []
    ways += ["a watchdog job checks how it ended"] if plan.watchdog else []
    return "; ".join([", ".join(told), *ways])


def plan_facts(plan: Plan) -> dict[str, Any]:
    """Return the facts of a job that `check --json` and `submit --dry-run --json` share; docs/files.md has the keys."""
    batch = plan.batch._asdict() if plan.batch else {}
    return {
        "name": plan.job.name,
        "site": plan.site.name,
        "scheduler": plan.site.scheduler,
        "nodes": {"min": plan.nodes.min, "max": plan.nodes.max, "spares": plan.nodes.spares},
        "ranks": {"total": plan.nodes.world, "per_node": plan.nodes.ranks_per_node},
        "batch": {"global": batch.pop("total"), **batch} if batch else None,
        "time": plan.job.resources.time,
        "image": plan.container.image,
        "gpu_hours": plan.gpu_hours,
    }
