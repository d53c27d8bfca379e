"""`slurmddp check`: the arithmetic of a job, for people."""

from __future__ import annotations

import shlex

from slurmddp.job.document import RUN
from slurmddp.job.plan.batch import ways
from slurmddp.job.plan.layout import partition_of
from slurmddp.job.plan.model import Plan
from slurmddp.job.resolve import Resolved
from slurmddp.job.train import Batch
from slurmddp.report.cost import cost_line
from slurmddp.report.groups import parallel_lines
from slurmddp.report.interval import interval_lines
from slurmddp.report.survival import survival_lines
from slurmddp.shared import batch as dealing
from slurmddp.styled import join, labelled

#: So many numbers of nodes are shown, where there may be fewer of them.
SHOWN = 8


def plan_report(plan: Plan, resolved: Resolved) -> str:
    """Return several lines of text."""
    lines = [
        f"{plan.name} on {plan.site_title}",
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
    allotted = "as Slurm allots" if plan.scheduler == "slurm" else "all of this machine"
    cores = allotted if layout.cpus_per_node is None else str(layout.cpus_per_node)
    if nodes.world is None:
        each = "GPU that Slurm gives the node" if layout.gpus_per_node else f"{layout.threads_per_rank} of its cores"
        shape = [f"{'ranks':<20}auto: a node starts one for each {each}"]
        threads = "shared by its ranks"
    else:
        what = "GPUs" if layout.gpus_per_node else "CPU ranks"
        shape = [
            f"{what + ' per node':<20}{layout.gpus_per_node or nodes.ranks_per_node}",
            f"ranks               {nodes.world} = {nodes.ranks_per_node} per node x {nodes.max}",
        ]
        threads = f"{layout.threads_per_rank} thread(s) per rank"
    return [
        f"nodes               {nodes_text(plan)}",
        *shape,
        f"cores per node      {cores}, {threads}",
        f"program             {program_text(plan)}",
        f"directory           {workdir_text(plan)}",
        f"runs in             {plan.container.runtime}" + (f" {plan.container.image}" if plan.container.image else ""),
    ]


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
    batch, ranks = plan.batch, plan.nodes.ranks_per_node
    counts = list(reversed(plan.nodes.below_max))
    if ranks is None or not counts:
        return []
    lines = ["with fewer nodes (same global batch)" if batch else "with fewer nodes"]
    for nodes in counts if len(counts) <= SHOWN else [*counts[: SHOWN - 1], counts[-1]]:
        line = f"  {nodes} node{'s' * (nodes > 1)} x {ranks} = {nodes * ranks} ranks"
        if batch is not None and batch.accumulation is not None:
            line += f", accumulation {dealing.accumulation(batch.total, batch.micro, nodes * ranks)}"
            line += "" if dealing.is_even(batch.total, batch.micro, nodes * ranks) else ", uneven"
        lines.append(line)
    return lines


def _batch(plan: Plan, resolved: Resolved) -> list[str]:
    batch, nodes, layout = plan.batch, plan.nodes, plan.layout
    if batch is None:
        return ["", "global batch        set by your script (set train.batch to see the arithmetic)"]
    if batch.accumulation is None or nodes.world is None:
        known = "the ranks found" if nodes.world is None else "the largest share"
        follows = f"accumulation follows from {known}"
        line = f"global batch        {batch.total}, micro batch up to {batch.micro}; {follows}"
        return ["", line, *_weights(resolved.job.train.batch)]
    per_node = "GPUs" if layout.gpus_per_node else "ranks"
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
    found = ways(batch, nodes, layout, 1 if plan.scheduler == "local" else partition.max_nodes, partition.gpus_per_node)
    if found:
        lines.append("same global batch with")
        for way in found:
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
