"""What `slurmddp check JOB.yaml` finds out."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from slurmddp.check.rule import SEVERITIES
from slurmddp.launch.job_check.cluster import Cluster
from slurmddp.launch.job_check.partitions import Offer, offers
from slurmddp.launch.job_check.rule import RULES, Finding, Subject, check_job
from slurmddp.launch.prepare import Prepared


class Answer(NamedTuple):
    """start: when Slurm would start the job, its local time; silent: which of Slurm's commands did not answer, and
    why, so that rules could not be checked; offers: None where nobody asked for partitions."""

    job: str
    findings: list[Finding]
    start: str | None
    silent: list[str]
    offers: list[Offer] | None

    def as_dict(self) -> dict[str, Any]:
        """Return the answer for --json; docs/check.md lists the keys."""
        counts = {name: sum(each.severity == name for each in self.findings) for name in SEVERITIES}
        return {
            "schema": 1,
            "job": self.job,
            "rules": len(RULES),
            "counts": counts,
            "findings": [each.as_dict() for each in self.findings],
            "start": self.start,
            "not_checked": self.silent,
            "partitions": None if self.offers is None else [each._asdict() for each in self.offers],
        }


def answer(prepared: Prepared, *, partitions: bool = False, cluster: Cluster | None = None) -> Answer:
    """Check a job by all rules, and ask Slurm when it would start."""
    subject = Subject(prepared, cluster or Cluster(), os.environ)
    plan = prepared.plan
    found = check_job(subject)
    asks = plan.scheduler == "slurm" and not plan.inside
    trial = subject.cluster.trial(plan.sbatch) if asks else None
    offered = offers(subject) if partitions and asks else None
    return Answer(plan.name, found, trial.start if trial else None, subject.cluster.silent, offered)
