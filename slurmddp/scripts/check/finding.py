"""Rules and what they find."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from slurmddp.scripts.check.rule import SEVERITIES, Rule, Severity, rule_of
from slurmddp.scripts.check.script import Script


class Hit(NamedTuple):
    """One place that breaks a rule. line: 0 for that of the launch; severity: where it differs from the rule's."""

    message: str
    line: int = 0
    severity: Severity | None = None


@dataclass(frozen=True)
class Finding:
    """A rule that a script breaks, and where."""

    path: str
    line: int
    rule: Rule[Script, Hit]
    severity: Severity
    message: str

    def as_dict(self) -> dict[str, str | int]:
        """Return the finding for --json."""
        return {
            "file": self.path, "line": self.line, "rule": self.rule.id, "severity": self.severity,
            "message": self.message, "reason": self.rule.reason, "fix": self.rule.fix, "source": self.rule.source,
        }  # fmt: skip


RULES: list[Rule[Script, Hit]] = []


def rule(check: Callable[[Script], Iterator[Hit]]) -> Callable[[Script], Iterator[Hit]]:
    """Register a function as a rule: it yields a Hit for each place that breaks it. script.rules has its texts."""
    RULES.append(rule_of(check, Path(__file__).with_name("script.rules")))
    return check


def check_script(script: Script, only: Collection[str] | None = None) -> list[Finding]:
    """Return what all rules find in a script, in the order of its lines. Bash says what it starts, where a sandbox can
    be made; otherwise its text alone is read. only: these rules; bash is asked if one of them needs it."""
    import slurmddp.scripts.check.rules  # noqa: F401 - registers the rules

    found = {
        (hit.line, each.id): Finding(str(script.path), hit.line, each, hit.severity or each.severity, hit.message)
        for each in RULES
        if only is None or each.id in only
        for hit in each.check(script)
    }
    return sorted(found.values(), key=lambda each: (each.line, SEVERITIES.index(each.severity), each.rule.id))
