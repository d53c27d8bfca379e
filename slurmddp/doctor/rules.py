"""The causes that doctor knows: the second part of slurmddp/shell/cause.rules. Its head says what the keys mean."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from slurmddp.runs.cause_rules import RULES, split_rules

#: How sure a pattern makes us, the surest first.
SURE = ("certain", "likely", "hint", "note")
#: Causes from here on say that something failed, but not why.
SYMPTOMS = 40
#: Causes from here on follow from another failure.
CASCADES = 50

_TEXTS = ("title", "why", "fix", "source")


@dataclass(frozen=True)
class Pattern:
    """One pattern of a cause. literal: characters that each matching line has, looked for first."""

    sure: str
    text: str
    literal: str

    @cached_property
    def regex(self) -> re.Pattern[str]:
        """The compiled pattern."""
        return re.compile(self.text)


@dataclass(frozen=True)
class Cause:
    """One block of the file."""

    id: str
    order: int
    title: str
    why: str
    fix: str
    source: str
    patterns: tuple[Pattern, ...]
    unless: re.Pattern[str] | None
    examples: tuple[str, ...]


class Catalogue:
    """All causes, ready to be looked for in lines."""

    def __init__(self, causes: Sequence[Cause]) -> None:
        self.causes = tuple(causes)
        self.by_id = {cause.id: cause for cause in causes}
        found: dict[str, list[tuple[Cause, Pattern]]] = {}
        for cause in causes:
            for pattern in cause.patterns:
                found.setdefault(pattern.literal, []).append((cause, pattern))
        self._by_literal = tuple(found.items())

    def matches(self, line: str) -> Iterator[tuple[Cause, str]]:
        """Yield each cause that the line speaks of once, with how sure its surest pattern makes us."""
        sure: dict[str, str] = {}
        for literal, entries in self._by_literal:
            if literal not in line:
                continue
            for cause, pattern in entries:
                before = sure.get(cause.id)
                if before is not None and SURE.index(before) <= SURE.index(pattern.sure):
                    continue
                if pattern.regex.search(line) and not (cause.unless and cause.unless.search(line)):
                    sure[cause.id] = pattern.sure
        for name, how in sure.items():
            yield self.by_id[name], how


@lru_cache(maxsize=1)
def catalogue() -> Catalogue:
    """Return the causes of this slurmddp."""
    return Catalogue(parse(split_rules(RULES.read_text(encoding="utf-8"))[1]))


def known_cause(text: str) -> Cause | None:
    """Return the cause that one line suggests; None, if it only says that something failed."""
    found = [cause for cause, sure in catalogue().matches(text) if sure in ("certain", "likely")]
    return min((cause for cause in found if cause.order < SYMPTOMS), key=lambda cause: cause.order, default=None)


def parse(text: str) -> list[Cause]:
    """Read the blocks. The file is ours: a mistake in it is a KeyError or a ValueError."""
    return [_cause(lines) for block in text.split("\n\n") if (lines := _lines(block))]


def _lines(block: str) -> list[tuple[str, str]]:
    pairs = (line.partition(" ") for line in block.splitlines() if line and not line.startswith("#"))
    return [(key, value) for key, _, value in pairs]


def _cause(lines: list[tuple[str, str]]) -> Cause:
    once = {key: value for key, value in lines if key not in (*SURE, "example")}
    known = {"cause", "order", "unless", *_TEXTS}
    if len(once) != sum(key not in (*SURE, "example") for key, _ in lines) or not once.keys() <= known:
        raise ValueError(f"a key is unknown or stands twice in cause {once['cause']}")
    return Cause(
        id=once["cause"],
        order=int(once["order"]),
        patterns=tuple(Pattern(key, value, literal_of(value)) for key, value in lines if key in SURE),
        unless=re.compile(once["unless"]) if "unless" in once else None,
        examples=tuple(value for key, value in lines if key == "example"),
        **{key: once[key] for key in _TEXTS},
    )


#: What a pattern consists of: a set, a group's bracket, an escape, a repetition, another character.
_PART = re.compile(r"(?P<set>\[\]?[^]]*\])|(?P<group>[()])|(?P<escape>\\.)|(?P<many>[*?+]|\{[0-9,]+\})|(?P<any>.)")


def literal_of(pattern: str) -> str:
    """Return the longest run of characters that a line must have to match."""
    runs, depth = [""], 0
    for part in _PART.finditer(pattern):
        kind, text = part.lastgroup, part[0]
        if kind == "group":
            depth += 1 if text == "(" else -1
        if depth or kind in ("set", "group") or text in ".^$" or (kind == "escape" and text[1].isalnum()):
            runs.append("")
        elif kind == "many":
            if text != "+":
                runs[-1] = runs[-1][:-1]
            runs.append("")
        elif text == "|":
            raise ValueError(f"{pattern!r}: put alternatives into ( )")
        else:
            runs[-1] += text[-1]
    return max(runs, key=len)
