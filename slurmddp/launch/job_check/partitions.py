"""Which partitions could hold a job, and which of them would start it first."""

from __future__ import annotations

from typing import NamedTuple

from slurmddp.job.plan.model import Plan
from slurmddp.launch.job_check.rule import Subject


class Offer(NamedTuple):
    """A partition. start: when it would start the job, the cluster's local time; refusal: why it would not."""

    partition: str
    start: str | None
    refusal: str | None


def offers(subject: Subject) -> list[Offer]:
    """Return the partitions that are up, the earliest start first, then those that refuse the job.

    Only the partition's name changes. Limits that the profile knows of another partition, and what it asks of that
    one beside its name, do not: `check --partition NAME` plans the job for it.
    """
    plan = subject.prepared.plan
    names = [name for name, row in (subject.cluster.partitions or {}).items() if row.get("State", "UP") == "UP"]
    found = []
    for name in names:
        trial = subject.cluster.trial(_in_partition(plan, name))
        if trial is not None:
            found.append(Offer(name, trial.start, trial.refusal))
    return sorted(found, key=lambda each: (each.refusal is not None, each.start or "9", each.partition))


def _in_partition(plan: Plan, name: str) -> list[str]:
    return [*(each for each in plan.sbatch if not each.startswith("--partition=")), f"--partition={name}"]
