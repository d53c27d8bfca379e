"""`slurmddp submit --dry-run`: the summary around the scripts."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from slurmddp.job.plan.model import Plan
from slurmddp.job.resolve import Resolved
from slurmddp.job.types import slurm_time
from slurmddp.report.cost import cost_line
from slurmddp.report.plan import nodes_text, program_text, workdir_text
from slurmddp.run.layout import RunFolder


def summary_lines(plan: Plan, resolved: Resolved, folder: RunFolder, command: Sequence[str]) -> list[str]:
    """Return what the job is, where it would write, and what it would run."""
    rows = [
        ("site", f"{plan.site} ({resolved.site_from})"),
        ("nodes", nodes_text(plan)),
        ("ranks", _ranks(plan)),
        ("batch", _batch(plan)),
        ("time", _time(plan)),
        ("image", plan.container.image or f"none; {plan.container.python} of the nodes"),
        ("program", program_text(plan)),
        ("directory", workdir_text(plan)),
        ("cost", cost_line(plan).removeprefix("cost: ")),
        ("writes", f"{folder.path} (RUN_ID: {plan.name}-DATE-TIME-XXXX)"),
        ("runs", shlex.join(command)),
    ]
    if plan.alerts:
        rows.append(("alerts", ", ".join(target.name for target in plan.alerts.targets)))
    return [f"{name:<10}{text}" for name, text in rows]


def machinery_lines(plan: Plan, folder: RunFolder, source: Path, code_hash: str | None, *, full: bool) -> list[str]:
    """Return where the shell functions are, and the hash of the code in the run folder."""
    rows = [
        ("functions", f"{folder.code_archive}, from {source}"),
        ("code hash", code_hash or "unknown: the project cannot be copied"),
    ]
    if not full:
        rows.append(("more", f"--full prints the functions{' and the payloads of alerts' if plan.alerts else ''}"))
    return [f"{name:<10}{text}" for name, text in rows]


def _ranks(plan: Plan) -> str:
    nodes, layout = plan.nodes, plan.layout
    if nodes.world is None:
        each = "GPU" if layout.gpus_per_node else f"{layout.threads_per_rank} cores"
        return f"auto: each node starts one per {each}"
    return f"{nodes.world} = {nodes.ranks_per_node} per node x {nodes.max}"


def _batch(plan: Plan) -> str:
    batch = plan.batch
    if batch is None:
        return "the script's own"
    if batch.accumulation is None or plan.nodes.world is None:
        return f"{batch.total}, micro batch up to {batch.micro}; accumulation follows from the ranks"
    product = f"{batch.micro} (micro batch) x {batch.accumulation} (accumulation) x {plan.nodes.world} (ranks)"
    return f"{batch.total} = {product}" if batch.even else f"{batch.total}, uneven, of at most {product}"


def _time(plan: Plan) -> str:
    if plan.scheduler == "local":
        return "no limit"
    limit = "the partition's default" if plan.time is None else slurm_time(plan.time)
    return limit + (f"; ranks save {plan.stop_lead} s before" if plan.stop_lead else "")
