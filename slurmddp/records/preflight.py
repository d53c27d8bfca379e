"""What the check of the nodes found: RUN/logs/attempt-NNN/preflight/verdict.json, which the first node writes."""

from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Tuple

from slurmddp.records.job_events import EITHER, USER

VERSION = 1
#: Levels: the node cannot train; it can.
BAD, WARN = "bad", "warn"
#: Control characters: some end a line.
_CONTROL = dict.fromkeys((*range(32), 127), " ")
#: A reason may quote a file name or an error of any length.
_LONGEST = 500
#: Warnings in the events.
_MOST = 20


class Finding(NamedTuple):
    """Something about one node. todo: what the user can do about it. fault: user, if it would be the same on
    another node; either, if another node may be at fault instead.
    """

    level: str
    reason: str
    todo: str
    fault: str = ""

    @property
    def text(self) -> str:
        """One line of plain text."""
        return plain("{} - {}".format(self.reason, self.todo) if self.todo else self.reason)


class Verdict(NamedTuple):
    """What is known of the nodes, by node, in their order: nothing, if all is well there."""

    findings: Mapping[str, Tuple[Finding, ...]]

    def bad(self, node: str) -> str:
        """Return why a node cannot train, in one line; empty if it can."""
        return "; ".join(finding.text for finding in self.findings.get(node, ()) if finding.level == BAD)

    def fault(self, node: str) -> str:
        """Return whose fault it is that a node cannot train; empty: its own. either: for all that is bad."""
        faults = {finding.fault for finding in self.findings.get(node, ()) if finding.level == BAD}
        return USER if USER in faults else EITHER if faults == {EITHER} else ""

    def lines(self) -> List[str]:
        """Return one line `NODE ok` or `NODE bad ...` for each node, and one for each warning, for people."""
        lines = []
        for node, findings in self.findings.items():
            bad = self.bad(node)
            lines.append("{} bad {}".format(node, bad) if bad else node + " ok")
            lines += ["{} warn {}".format(node, finding.text) for finding in findings if finding.level == WARN]
        return lines

    def warnings(self) -> List[str]:
        """Return each warning once, with its first node and how many others have it."""
        having = {}  # type: Dict[str, List[str]]
        for node, findings in self.findings.items():
            for text in dict.fromkeys(finding.text for finding in findings if finding.level == WARN):
                having.setdefault(text, []).append(node)
        lines = []
        for text, (first, *others) in having.items():
            lines.append("{}{}: {}".format(first, " and {} more".format(len(others)) if others else "", text))
        more = ["{} more warnings: see verdict.json".format(len(lines) - _MOST)] if len(lines) > _MOST else []
        return [*lines[:_MOST], *more]

    def write(self) -> Dict[str, Any]:
        nodes = {node: [list(finding) for finding in findings] for node, findings in self.findings.items()}
        return {"schema": VERSION, "nodes": nodes}


def read(record: Any) -> Verdict:
    """Return what an object says. Raises ValueError if it is no verdict."""
    nodes = record.get("nodes") if isinstance(record, dict) else None
    if not isinstance(nodes, dict):
        raise ValueError("is no verdict of a preflight")
    return Verdict({node: tuple(read_findings(items)) for node, items in nodes.items()})


def read_findings(items: Any) -> List[Finding]:
    """Return findings as they came over the network, or from a file. Raises ValueError for anything else."""
    findings = []
    for item in items if isinstance(items, list) else [None]:
        if not (isinstance(item, list) and len(item) in (3, 4) and item[0] in (BAD, WARN)):
            raise ValueError("not a finding: {!r}".format(item))
        findings.append(Finding(item[0], str(item[1]), str(item[2]), item[3] if item[3:] in ([USER], [EITHER]) else ""))
    return findings


def bad(reason: str, todo: str, fault: str = "") -> Finding:
    return Finding(BAD, reason, todo, fault)


def warn(reason: str, todo: str) -> Finding:
    return Finding(WARN, reason, todo)


def any_bad(found: Iterable[Finding]) -> bool:
    return any(finding.level == BAD for finding in found)


def plain(text: str) -> str:
    """Return the text on one line, without control characters, shortened to a few lines of a terminal."""
    text = " ".join(text.translate(_CONTROL).split())
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
