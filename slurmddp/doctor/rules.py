"""The causes that doctor knows: the second part of causes/cause.rules. Its head says what the keys mean."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from slurmddp.causes.rules import rules_text, split_rules

#: How sure a pattern makes us, the surest first.
SURE = ("certain", "likely", "hint", "note")
#: Causes from here on say that something failed, but not why.
SYMPTOMS = 40

#: An error that no other cause explains.
UNKNOWN = "unknown"


_TEXTS = ("title", "why", "fix", "source")


@dataclass(frozen=True)
class Pattern:
    """One pattern of a cause. literal: characters that each matching line has, looked for first."""

    sure: str
    text: str
    literal: str

    @cached_property
    def parts(self) -> tuple[re.Pattern[str], ...]:
        """Return what stands between `.*`. As one pattern, a line of many first parts would cost its length squared."""
        return tuple(map(re.compile, _split(self.text)))

    def matches(self, line: str) -> bool:
        """Return whether the line has all parts, in this order."""
        at = 0
        for part in self.parts:
            match = part.search(line, at)
            if match is None:
                return False
            at = match.end()
        return True


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
        self._places = {name: place for place, name in enumerate(self.by_id)}
        by_literal: dict[str, list[tuple[Cause, Pattern]]] = {}
        for cause in causes:
            for pattern in cause.patterns:
                by_literal.setdefault(pattern.literal, []).append((cause, pattern))
        self._by_gram: dict[str, list[tuple[str, list[tuple[Cause, Pattern]]]]] = {}
        common = Counter(gram for literal in by_literal for gram in _grams(literal))
        for literal, entries in by_literal.items():
            rarest = min(_grams(literal), key=lambda gram: (common[gram], gram))
            self._by_gram.setdefault(rarest, []).append((literal, entries))

    def matches(self, line: str) -> Iterator[tuple[Cause, str]]:
        """Yield each cause that the line speaks of once, with how sure its surest pattern makes us."""
        sure: dict[str, str] = {}
        # Most lines have none of the literals: a search for each of them would cost more than that for a part of each.
        candidates = (each for gram in self._by_gram.keys() & _grams(line) for each in self._by_gram[gram])
        for literal, entries in candidates:
            if literal not in line:
                continue
            for cause, pattern in entries:
                before = sure.get(cause.id)
                if before is not None and SURE.index(before) <= SURE.index(pattern.sure):
                    continue
                if pattern.matches(line) and not (cause.unless and cause.unless.search(line)):
                    sure[cause.id] = pattern.sure
        if any(how in ("certain", "likely") for name, how in sure.items() if name != UNKNOWN):
            sure.pop(UNKNOWN, None)
        for name in sorted(sure, key=lambda each: self._places[each]):
            yield self.by_id[name], sure[name]


def _grams(text: str) -> set[str]:
    return {text[at : at + 3] for at in range(len(text) - 2)}


@lru_cache(maxsize=1)
def catalogue() -> Catalogue:
    return Catalogue(parse(split_rules(rules_text())[1]))


def known_cause(text: str) -> Cause | None:
    """Return the cause that one line suggests; None, if it only says that something failed."""
    causes = [cause for cause, sure in catalogue().matches(text) if sure in ("certain", "likely")]
    return min((cause for cause in causes if cause.order < SYMPTOMS), key=lambda cause: cause.order, default=None)


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


def _split(pattern: str) -> list[str]:
    """Split a pattern at each `.*` that is not in a group."""
    parts, depth = [""], 0
    for part in _PART.finditer(pattern):
        if part.lastgroup == "group":
            depth += 1 if part[0] == "(" else -1
        if depth == 0 and part[0] == "*" and parts[-1].endswith(".") and not parts[-1].endswith("\\."):
            parts[-1] = parts[-1][:-1]
            parts.append("")
        else:
            parts[-1] += part[0]
    return parts


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
