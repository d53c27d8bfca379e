"""What `slurmddp check JOB.yaml` finds out beside the plan."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from slurmddp.errors import UserError
from slurmddp.job.plan.model import Plan
from slurmddp.launch.facts import plan_facts
from slurmddp.launch.job_check.cluster import Cluster
from slurmddp.launch.job_check.partitions import Offer, offers
from slurmddp.launch.job_check.rule import RULES, Finding, Subject, check_job
from slurmddp.launch.prepare import Prepared
from slurmddp.launch.script_facts import script_dict
from slurmddp.render.scripts import python_of_submit
from slurmddp.scripts.check.rule import SEVERITIES

_PYTHON = (
    "a Python 3.6 or newer on each node: /usr/bin/python3, /usr/libexec/platform-python or {} "
    "(`slurmddp check --preflight` asks the nodes)"
)


class Answer(NamedTuple):
    """mistakes: why `submit` would refuse the job, whatever the rules say; elsewhere: what only a login node of the
    cluster can tell; start: when Slurm would start the job, its local time; silent: which of Slurm's commands did not
    answer, and why; offers: None where nobody asked for partitions; depends: on what of the nodes the job depends,
    which no rule can see from here; script: what the user's program does, as `script_facts` says."""

    plan: Plan
    mistakes: list[str]
    findings: list[Finding]
    elsewhere: list[str]
    start: str | None
    silent: list[str]
    offers: list[Offer] | None
    depends: list[str]
    script: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the answer for --json; docs/check.md lists the keys."""
        counts = {name: sum(each.severity == name for each in self.findings) for name in SEVERITIES}
        return {
            "schema": 1,
            "job": self.plan.name,
            "plan": plan_facts(self.plan),
            "mistakes": self.mistakes,
            "rules": len(RULES),
            "counts": counts,
            "findings": [each.as_dict() for each in self.findings],
            "start": self.start,
            "not_checked": [*self.elsewhere, *self.silent],
            "depends_on": self.depends,
            "script": self.script,
            "partitions": None if self.offers is None else [each._asdict() for each in self.offers],
        }


def answer(
    prepared: Prepared, refused: UserError | None = None, *, partitions: bool = False, cluster: Cluster | None = None
) -> Answer:
    """Check a job by all rules, and ask Slurm when it would start. refused: its mistakes, with which no rule is run."""
    if refused is not None:
        return Answer(prepared.plan, [str(part) for part in refused.parts], [], [], None, [], None, [])
    subject = Subject(prepared, cluster or Cluster(), os.environ)
    plan = prepared.plan
    found = check_job(subject)
    asks = plan.scheduler == "slurm" and not plan.inside
    trial = subject.cluster.trial(plan.sbatch) if asks else None
    offered = offers(subject) if partitions and asks else None
    elsewhere = [f"{error.where}: {error.what}" if error.where else error.what for error in subject.elsewhere]
    start = trial.start if trial else None
    depends = [_PYTHON.format(python_of_submit())] if plan.scheduler == "slurm" else []
    script = script_dict(prepared)
    return Answer(plan, [], found, elsewhere, start, subject.cluster.silent, offered, depends, script)
