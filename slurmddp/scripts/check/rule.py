"""What a rule is, of scripts and of jobs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Generic, Literal, TypeVar, cast

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
SubjectT = TypeVar("SubjectT")
HitT = TypeVar("HitT")


@dataclass(frozen=True)
class Rule(Generic[SubjectT, HitT]):
    """A pitfall: how bad it is, why, where a reader finds it documented, and what to do."""

    id: str
    severity: Severity
    reason: str
    source: str
    fix: str
    check: Callable[[SubjectT], Iterator[HitT]]


def rule_of(check: Callable[[SubjectT], Iterator[HitT]], file: Path) -> Rule[SubjectT, HitT]:
    """Return the rule that a function is, with its texts in a .rules file."""
    head, reason, source, *fix = _texts(file)[check.__name__]
    id, _, severity = head.partition(" ")
    return Rule(id, cast(Severity, severity), reason, source, "".join(fix), check)


@cache
def _texts(file: Path) -> dict[str, list[str]]:
    """Return the lines of each rule in a .rules file, by its function. The head of the file explains them."""
    blocks = re.split(r"\n\n+", file.read_text(encoding="utf-8").strip())[1:]
    return {block.split()[0].replace("-", "_"): block.splitlines() for block in blocks}
