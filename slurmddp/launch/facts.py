"""What a job is, in the words of --json."""

from __future__ import annotations

from typing import Any

from slurmddp.job.plan.model import Plan


def plan_facts(plan: Plan) -> dict[str, Any]:
    """Return the facts of a job that `check --json` and `submit --dry-run --json` share; docs/files.md has the keys."""
    batch = plan.batch._asdict() if plan.batch else {}
    return {
        "name": plan.name,
        "site": plan.site,
        "scheduler": plan.scheduler,
        "nodes": {"min": plan.nodes.min, "max": plan.nodes.max, "spares": plan.nodes.spares},
        "ranks": {"total": plan.nodes.world, "per_node": plan.nodes.ranks_per_node},
        "batch": {"global": batch.pop("total"), **batch} if batch else None,
        "time": plan.time,
        "image": plan.container.image,
        "gpu_hours": plan.gpu_hours,
    }
