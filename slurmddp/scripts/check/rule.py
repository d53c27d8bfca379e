"""What a rule is, of scripts and of jobs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
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


@cache
def rule_texts(file: Path) -> dict[str, list[str]]:
    """Return the lines of each rule in a .rules file, by its function. The head of the file explains them."""
    blocks = re.split(r"\n\n+", file.read_text(encoding="utf-8").strip())[1:]
    return {block.split()[0].replace("-", "_"): block.splitlines() for block in blocks}
