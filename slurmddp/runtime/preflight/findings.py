"""What is found about a node, and the lines that job.sh reads."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

#: Control characters: some end a line.
_CONTROL = dict.fromkeys((*range(32), 127), " ")
#: A reason may quote a file name or an error of any length.
_LONGEST = 500
#: Warnings in the events.
_MOST = 20


class Finding(NamedTuple):
    """Something about one node. bad: it cannot train; warn: it can. todo: what the user can do about it."""

    level: Literal["bad", "warn"]
    reason: str
    todo: str

    @property
    def text(self) -> str:
        """One line of plain text."""
        return plain(f"{self.reason} - {self.todo}")


def bad(reason: str, todo: str) -> Finding:
    return Finding("bad", reason, todo)


def warn(reason: str, todo: str) -> Finding:
    return Finding("warn", reason, todo)


def any_bad(found: Iterable[Finding]) -> bool:
    return any(finding.level == "bad" for finding in found)


def plain(text: str) -> str:
    """Return the text on one line, without control characters, shortened to a few lines of a terminal."""
    text = " ".join(text.translate(_CONTROL).split())
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def from_json(items: Iterable[Any]) -> list[Finding]:
    """Return findings as they came over the network. Raises ValueError for anything else."""
    found = []
    for item in items:
        if not (isinstance(item, list) and len(item) == 3 and item[0] in ("bad", "warn")):
            raise ValueError(f"not a finding: {item!r}")
        found.append(Finding(item[0], str(item[1]), str(item[2])))
    return found


def warnings(nodes: Sequence[str], found: Mapping[str, Sequence[Finding]]) -> list[str]:
    """Return each warning once, with its first node and how many others have it."""
    having: dict[str, list[str]] = {}
    for node in nodes:
        for text in dict.fromkeys(finding.text for finding in found.get(node, ()) if finding.level == "warn"):
            having.setdefault(text, []).append(node)
    lines = [
        f"{first}{f' and {len(others)} more' if others else ''}: {text}" for text, (first, *others) in having.items()
    ]
    more = [f"{len(lines) - _MOST} more warnings: see the file verdict"] if len(lines) > _MOST else []
    return [*lines[:_MOST], *more]


def verdict(nodes: Sequence[str], found: Mapping[str, Sequence[Finding]]) -> list[str]:
    """Return one line `NODE ok` or `NODE bad ...` for each node, in the given order, and one for each warning."""
    lines = []
    for node in nodes:
        reasons = [finding.text for finding in found.get(node, ()) if finding.level == "bad"]
        lines.append(f"{node} bad {'; '.join(reasons)}" if reasons else f"{node} ok")
        lines += [f"{node} warn {finding.text}" for finding in found.get(node, ()) if finding.level == "warn"]
    return lines
