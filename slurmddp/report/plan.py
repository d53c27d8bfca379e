"""`slurmddp plan`: the arithmetic of a job, for people."""

from __future__ import annotations

from slurmddp.plan.batch import ways
from slurmddp.plan.layout import partition_of
from slurmddp.plan.model import Plan
from slurmddp.report.cost import cost_line
from slurmddp.spec.resolve import Resolved


def plan_report(plan: Plan, resolved: Resolved) -> str:
    """Several lines of text."""
    lines = [
        f"{plan.name} on {plan.site_title}",
        "",
        *_layout(plan),
        *_batch(plan, resolved),
        "",
        cost_line(plan),
    ]
    lines += [f"{note.level}: {note.text}" for note in plan.notes]
    return "\n".join(lines)


def _layout(plan: Plan) -> list[str]:
    layout = plan.layout
    cores = "as Slurm allots" if layout.cpus_per_node is None else str(layout.cpus_per_node)
    what = "GPUs" if layout.gpus_per_node else "ranks (CPU)"
    return [
        f"nodes               {layout.nodes}",
        f"{what + ' a node':<20}{layout.gpus_per_node or layout.ranks_per_node}",
        f"ranks               {layout.world} = {layout.ranks_per_node} a node x {layout.nodes}",
        f"cores a node        {cores}, {layout.threads_per_rank} thread(s) a rank",
        f"runs in             {plan.container.runtime}" + (f" {plan.container.image}" if plan.container.image else ""),
    ]


def _batch(plan: Plan, resolved: Resolved) -> list[str]:
    batch, layout = plan.batch, plan.layout
    if batch is None:
        return ["", "global batch        the script's own (set train.batch to see its arithmetic)"]
    per_node = "GPUs" if layout.gpus_per_node else "ranks"
    product = (
        f"{batch.micro} (micro batch) x {batch.accumulation} (accumulation)"
        f" x {layout.ranks_per_node} ({per_node} a node) x {layout.nodes} (nodes)"
    )
    lines = ["", f"global batch        {batch.total} = {product}"]
    if not batch.even:
        largest = batch.micro * batch.accumulation * layout.world
        lines = [
            "",
            f"global batch        {batch.total} of at most {largest} = {product}; uneven, correctly weighted",
        ]
    partition = partition_of(resolved)
    found = ways(batch, layout, 1 if plan.scheduler == "local" else partition.max_nodes, partition.gpus_per_node)
    if found:
        lines.append("the same global batch, by")
        for way in found:
            ranks = way.nodes * way.ranks_per_node
            product = f"{way.nodes} nodes x {way.ranks_per_node} = {ranks} ranks"
            lines.append(f"  {way.change:<20}{product}, accumulation {way.accumulation}")
    return lines
