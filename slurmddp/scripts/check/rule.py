"""What a rule is, of scripts and of jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

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
