"""Rules of a job, what they read, and what they find."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from slurmddp.errors import UserError
from slurmddp.launch.job_check.cluster import Cluster
from slurmddp.launch.prepare import Prepared
from slurmddp.launch.problems import absent_secrets, problems, unknown_here
from slurmddp.scripts.check.rule import SEVERITIES, Rule, Severity, rule_of


@dataclass(frozen=True)
class Subject:
    """The job under check, what its cluster says, and the environment that the job would inherit."""

    prepared: Prepared
    cluster: Cluster
    environment: Mapping[str, str]

    @cached_property
    def missing(self) -> list[UserError]:
        """Return what this machine lacks of the job: `submit` refuses it for that."""
        return [*problems(self.prepared), *absent_secrets(self.prepared.plan)]

    @property
    def elsewhere(self) -> list[UserError]:
        """Return those of them that only a login node of the cluster can tell."""
        return unknown_here(self.prepared.plan, self.missing)

    def where(self, key: str) -> str:
        """Return `FILE:LINE: key` of a key of the job."""
        return self.prepared.resolved.location(*key.split("."))


class Hit(NamedTuple):
    """One thing that breaks a rule. fix, severity: where they differ from the rule's."""

    where: str
    message: str
    fix: str | None = None
    severity: Severity | None = None


@dataclass(frozen=True)
class Finding:
    """A rule that a job breaks, and where."""

    rule: Rule[Subject, Hit]
    severity: Severity
    where: str
    message: str
    fix: str

    def as_dict(self) -> dict[str, str]:
        return {**vars(self), "rule": self.rule.id, "reason": self.rule.reason, "source": self.rule.source}


RULES: list[Rule[Subject, Hit]] = []
_Check = Callable[[Subject], Iterator[Hit]]


def rule(check: _Check) -> _Check:
    """Register a function as a rule: it yields a Hit for each thing that breaks it. job.rules has its texts."""
    RULES.append(rule_of(check, Path(__file__).with_name("job.rules")))
    return check


#: `submit` refuses the first itself and asks sbatch at once; a name server may take seconds to answer.
_NOT_IN_SUBMIT = frozenset(("submit-refuses", "slurm-refuses", "alert-address"))


def advice(prepared: Prepared) -> list[str]:
    """Return what `submit` warns of. Nothing here keeps a job from Slurm: a rule may be wrong about a cluster."""
    findings = check_job(Subject(prepared, Cluster(), os.environ), skip=_NOT_IN_SUBMIT)
    return [f"{each.where}: {each.message}; {each.fix}" for each in findings if each.severity != "note"]


def check_job(subject: Subject, skip: frozenset[str] = frozenset()) -> list[Finding]:
    """Return what the rules find in a job, the worst first."""
    import slurmddp.launch.job_check.rules  # noqa: F401 - registers the rules

    findings = [
        Finding(each, hit.severity or each.severity, hit.where, hit.message, hit.fix or each.fix)
        for each in RULES
        if each.id not in skip
        for hit in each.check(subject)
    ]
    return sorted(dict.fromkeys(findings), key=lambda each: SEVERITIES.index(each.severity))
