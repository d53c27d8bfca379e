"""Nodes that recent runs of a site found bad: the site's next jobs avoid them until they expire.

Most of it is in the events of the runs themselves. A file beside the index has what the user added or forgot.
"""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slurmddp.errors import UserError
from slurmddp.records.bad_node import UserNote, read
from slurmddp.records.cause import GPU
from slurmddp.records.events import Event
from slurmddp.records.job_events import PREFLIGHT, AttemptEnded, NodeExcluded, Preflight
from slurmddp.run import index
from slurmddp.run.events import Lines, Record, append_line, read_events, read_lines

#: Runs of the site that are looked at, newest first: each costs a file on a shared file system.
_RUNS = 100
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)


@dataclass(frozen=True)
class BadNode:
    """A node to avoid. time, expires: unix seconds; run: None if the user added it."""

    node: str
    reason: str
    run: str | None
    time: float
    expires: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def bad_nodes(site: str, keep: float, now: float) -> list[BadNode]:
    """Return the site's bad nodes of the last `keep` seconds, newest first. What cannot be read says nothing."""
    found: dict[str, BadNode] = {}
    said = [*_of_user(site), *(_of_runs(site, now - keep) if keep else ())]
    for node, reason, run, when in sorted(said, key=lambda each: each[3]):
        if reason is None:
            found.pop(node, None)
        elif now - keep < when:
            found[node] = BadNode(node, reason, run, when, when + keep)
    return sorted(found.values(), key=lambda each: -each.time)


def add(site: str, node: str, reason: str) -> None:
    """Remember a node. Raises UserError for what is no node's name, and OSError."""
    if not _NAME.fullmatch(node):
        todo = "give one name, such as node17; sinfo -N lists them"
        raise UserError(f"{node!r} is not the name of a node", todo=todo)
    _append(UserNote(site, node, reason, time.time()))


def forget(site: str, node: str) -> None:
    """Let jobs use a node again, whatever was said of it so far. Raises OSError."""
    _append(UserNote(site, node, None, time.time()))


def blamed(events: Sequence[Event]) -> Iterator[tuple[str, str, float]]:
    """Yield (node, reason, time) where a run found that a node itself is at fault. Pure.

    Not for what the user has to correct, nor where the preflight found more than half of its nodes bad: then something
    else is at fault. After each preflight, job.sh writes the nodes that it excluded, then the event `preflight`.
    """
    found: list[tuple[str, str, float]] = []
    for event in events:
        facts, when = event.facts, event.time
        if when is None:
            continue
        if isinstance(facts, Preflight):
            if facts.checked is not None and 2 * len(facts.bad.split()) <= facts.checked:
                yield from found
            found = []
        elif isinstance(facts, NodeExcluded):
            if facts.fault:
                continue
            told = (facts.excluded, facts.reason, when)
            if facts.check == PREFLIGHT:
                found.append(told)
            else:
                yield told
        elif isinstance(facts, AttemptEnded) and facts.node and facts.kind == GPU:
            yield facts.node, facts.cause, when


def _file() -> Path:
    return index.state_folder() / "bad-nodes.jsonl"


def _append(note: UserNote) -> None:
    _file().parent.mkdir(parents=True, exist_ok=True)
    append_line(_file(), note.write())


_Said = tuple[str, str | None, str | None, float]


def _of_user(site: str) -> Iterator[_Said]:
    """Yield (node, reason, no run, time); without a reason, the node is to be forgotten."""
    for line in _sound(read_lines, _file()):
        note = read(line)
        if note is not None and note.site == site and _NAME.fullmatch(note.node):
            yield note.node, note.reason, None, note.time


def _of_runs(site: str, since: float) -> Iterator[_Said]:
    for entry in index.newest(site, _RUNS):
        path = entry.folder.events
        try:
            if path.stat().st_mtime <= since:
                continue
        except OSError:
            continue
        for node, reason, when in blamed(_sound(read_events, path)):
            if _NAME.fullmatch(node):
                yield node, reason, entry.id, when


def _sound(read: Callable[[Path], Lines[Record]], path: Path) -> tuple[Record, ...]:
    try:
        return read(path).records
    except (OSError, RuntimeError):
        return ()
