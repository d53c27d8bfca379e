"""`slurmddp check JOB.yaml`: what the rules, Slurm and the script itself say of a job."""

import json
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from slurmddp.commands.check.script import total
from slurmddp.commands.script_facts import script_dict, sentence_lines
from slurmddp.errors import UserError
from slurmddp.job.plan.model import Plan
from slurmddp.launch.job_check.cluster import Cluster
from slurmddp.launch.job_check.rule import RULES, Finding, Subject, check_job
from slurmddp.launch.prepare import Prepared
from slurmddp.render.scripts import python_of_submit
from slurmddp.report.plan import plan_facts
from slurmddp.scripts.check.rule import SEVERITIES
from slurmddp.styled import labelled
from slurmddp.visible import one_line


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
    known = []
    options = [each for each in subject.prepared.plan.sbatch if not each.startswith("--partition=")]
    for name, row in (subject.cluster.partitions or {}).items():
        trial = subject.cluster.trial([*options, f"--partition={name}"]) if row.get("State", "UP") == "UP" else None
        if trial is not None:
            known.append(Offer(name, trial.start, trial.refusal))
    return sorted(known, key=lambda each: (each.refusal is not None, each.start or "9", each.partition))


_PYTHON = (
    "a Python 3.6 or newer on each node: /usr/bin/python3, /usr/libexec/platform-python or {} "
    "(`slurmddp check --preflight` asks the nodes)"
)


class Answer(NamedTuple):
    """mistakes: why `submit` would refuse the job, whatever the rules say, which are not run then.

    start: when Slurm would start the job, its local time; not_checked: what only a login node of the cluster can tell,
    and which of Slurm's commands did not answer; offers: None where nobody asked for partitions; depends: on what of
    the nodes the job depends, which no rule can see from here; script: what the user's program does.
    """

    plan: Plan
    mistakes: list[str]
    findings: list[Finding]
    start: str | None
    not_checked: list[str]
    offers: list[Offer] | None
    depends: list[str]
    script: dict[str, Any] | None = None

    @property
    def counts(self) -> dict[str, int]:
        """Return how many findings there are of each severity."""
        return {name: sum(each.severity == name for each in self.findings) for name in SEVERITIES}

    def as_dict(self) -> dict[str, Any]:
        """Return the answer for --json; docs/check.md lists the keys."""
        return {
            "schema": 1,
            "job": self.plan.job.name,
            "plan": plan_facts(self.plan),
            "mistakes": self.mistakes,
            "rules": len(RULES),
            "counts": self.counts,
            "findings": [each.as_dict() for each in self.findings],
            "start": self.start,
            "not_checked": self.not_checked,
            "depends_on": self.depends,
            "script": self.script,
            "partitions": None if self.offers is None else [each._asdict() for each in self.offers],
        }

    def lines(self) -> Iterator[str]:
        """Yield each finding as `WHERE: severity: message [rule]` with its fix, then the counts."""
        explained: set[str] = set()
        for each in self.findings:
            where = f"{one_line(each.where)}: " if each.where else ""
            yield where + labelled(each.severity, f"{one_line(each.message)} [{each.rule.id}]")
            if each.rule.id not in explained:
                explained.add(each.rule.id)
                yield f"    why: {each.rule.reason}"
                yield f"    see: {each.rule.source}"
            if each.fix:
                yield f"    fix: {one_line(each.fix)}"
        if self.script:
            yield from _script_lines(self.script)
        for offer in self.offers or ():
            when = offer.start or (one_line(offer.refusal) if offer.refusal else "Slurm does not say when")
            yield f"partition {offer.partition:<16} {when}"
        for why in self.not_checked:
            yield f"not checked: {one_line(why)}"
        for what in self.depends:
            yield f"not checked, the job depends on it: {one_line(what)}"
        start = f"; Slurm would start it at {self.start}" if self.start else ""
        yield f"job {self.plan.job.name}, {len(RULES)} rules: {total(self.counts)}{start}"


def examine(
    prepared: Prepared, refused: UserError | None = None, *, partitions: bool = False, cluster: Cluster | None = None
) -> Answer:
    """Check a job by all rules, and ask Slurm when it would start. refused: its mistakes, with which no rule is run."""
    plan = prepared.plan
    if refused is not None:
        return Answer(plan, [str(part) for part in refused.parts], [], None, [], None, [])
    subject = Subject(prepared, cluster or Cluster(), os.environ)
    findings = check_job(subject)
    asks = plan.queued
    trial = subject.cluster.trial(plan.sbatch) if asks else None
    offered = offers(subject) if partitions and asks else None
    elsewhere = [f"{error.where}: {error.what}" if error.where else error.what for error in subject.elsewhere]
    depends = [_PYTHON.format(python_of_submit())] if plan.site.queues else []
    script = script_dict(prepared)
    not_checked = [*elsewhere, *subject.cluster.silent]
    return Answer(plan, [], findings, trial.start if trial else None, not_checked, offered, depends, script)


def _script_lines(script: dict[str, Any]) -> Iterator[str]:
    """Yield the sentences about the user's program, what is proposed for the job file, and what is not known."""
    name = one_line(script["script"].rpartition("/")[2])
    yield from sentence_lines(script)
    for each in script["proposals"]:
        value = json.dumps(each["value"])
        yield f"{name}: " + labelled("note", f"proposed for the job file: {each['key']}: {one_line(value)}")
        yield f"    why: {one_line(each['why'])}"
    for each in script["not_read"]:
        yield f"not read: {one_line(each['name'])}: {one_line(each['why'])}"
    unknown = [fact for fact, answer in script["facts"].items() if answer["answer"] == "cannot tell"]
    if unknown:
        more = f" and {len(unknown) - 3} more (--json has all)" if len(unknown) > 3 else ""
        yield f"{name}: cannot tell from its text: {', '.join(unknown[:3])}{more}"
