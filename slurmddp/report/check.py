"""What `slurmddp check` found, for people and for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slurmddp.scripts.check.finding import Finding
from slurmddp.scripts.check.fix import Fixed
from slurmddp.scripts.check.rule import SEVERITIES
from slurmddp.scripts.check.script import Script
from slurmddp.styled import labelled, styled
from slurmddp.visible import one_line


def lines(scripts: Sequence[Script], found: Sequence[Finding]) -> Iterator[str]:
    """Yield each finding as `FILE:LINE: severity: message [rule]`, then the counts. Each rule is explained once."""
    yield from _explained(found)
    checked = f"{len(scripts)} script{'s' * (len(scripts) != 1)}"
    yield f"{checked} checked: {total(Counter(each.severity for each in found))}"


def fix_lines(script: Script, fixed: Fixed) -> Iterator[str]:
    """Yield each correction as `FILE:LINE: fixed: message [rule]`, then what is left as `lines` does. The lines are
    those of the file."""
    path = one_line(str(script.path))
    for each in fixed.done:
        yield f"{path}:{each.line}: " + styled("fixed:", "good") + f" {one_line(each.message)} [{each.rule.id}]"
    yield from _explained(fixed.left)
    left = total(Counter(each.severity for each in fixed.left)) if fixed.left else "none"
    yield f"{len(fixed.done)} fixed, not fixed: {left}"
    if fixed.doubt:
        yield f"{path}: no {'other line' if fixed.done else 'line'} was corrected: {fixed.doubt}."
    if fixed.stopped:
        yield f"{path}: not every fix was tried: too many findings. Correct some by hand, then run it again."


def _explained(found: Sequence[Finding]) -> Iterator[str]:
    explained: set[str] = set()
    for each in found:
        yield f"{one_line(each.path)}:{each.line}: " + labelled(
            each.severity, f"{one_line(each.message)} [{each.rule.id}]"
        )
        if each.rule.id not in explained:
            explained.add(each.rule.id)
            yield f"    why: {each.rule.reason}"
            yield f"    fix: {each.rule.fix}"
            yield f"    see: {each.rule.source}"


def total(counts: Mapping[Any, int]) -> str:
    """Return the counts by severity: `2 errors, 1 note`."""
    return (
        ", ".join(f"{counts[name]} {name}{'s' * (counts[name] != 1)}" for name in SEVERITIES if counts[name])
        or "nothing found"
    )


def as_dict(scripts: Sequence[Script], found: Sequence[Finding]) -> dict[str, Any]:
    """Return the findings for --json; docs/check.md lists the keys."""
    counts = Counter(each.severity for each in found)
    return {
        "schema": 1,
        "files": [str(each.path) for each in scripts],
        "counts": {name: counts[name] for name in SEVERITIES},
        "findings": [each.as_dict() for each in found],
    }
