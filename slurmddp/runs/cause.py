"""Why a run failed: the first rank that said so, out of events and logs."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from slurmddp.runs.events import read_lines
from slurmddp.runs.files import open_plain, read_plain
from slurmddp.runs.layout import RunFolder
from slurmddp.runs.logs import Follower

# PyTorch writes an uncaught exception with the rank before each line; without a process group it is plain Python's.
_EXCEPTION = re.compile(r"^(?:\[rank(?P<rank>\d+)\]: )?(?P<what>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt)\b.*)$")
_OURS = re.compile(r"^slurmddp: node \S+: (?P<what>.+)$")
# What torchrun says of its workers, and what ranks say of another one that is gone.
_TORCHRUN = re.compile("ChildFailedError|SignalException")
_CONSEQUENCE = re.compile(
    "Connection (closed|reset)|Broken pipe|remote process exited|DistNetworkError|ncclRemoteError|Watchdog caught"
    "|Rendezvous[A-Za-z]{0,40}Error"
)
# The end of torchrun's report of a failure: the rank that it saw fail first, of those on this node; in so many lines.
_ROOT_CAUSE = "Root Cause (first observed failure):"
_ROOT_FACT = re.compile(r" *(rank|exitcode) *: (-?[0-9]{1,9})\b")
_ROOT_LINES = 10
# torchrun ends the other ranks with these, and the process group ends one that waits in vain.
_ENDED_BY_OTHERS = ("SIGTERM", "SIGINT", "SIGABRT")
_LAST_BYTES = 1_000_000
#: Characters of a line in which a cause is looked for, and that are shown of it.
_LINE = 2000


class _Found(NamedTuple):
    """What somebody wrote, as one line; consequence: it follows from what another rank met."""

    line: str
    consequence: bool


def find_cause(folder: RunFolder, attempt: int | None) -> str | None:
    """One line that names rank, node, error and log; None where nobody wrote one.

    The bundled entrypoint writes events; of a script of the user's own, the logs of the attempt are searched. A lost
    connection is what the other ranks see of the one that failed: it counts only where nothing else is found, not even
    a rank that was killed, of which only torchrun tells. What the job's script itself found out at the end of the
    attempt goes before all of this: it saw the nodes as well.
    """
    if told := _of_script(folder, attempt):
        return told
    found = [*_of_events(folder, attempt), *_of_logs(folder, attempt)]
    if all(each.consequence for each in found):
        found = [*_of_torchrun(folder, attempt), *found]
    return next((each.line for each in sorted(found, key=lambda each: each.consequence)), None)


def _of_script(folder: RunFolder, attempt: int | None) -> str | None:
    """The cause in the newest attempt_ended, else what the check of the nodes before the start found."""
    told: Mapping[str, Any] = {}
    bad: dict[str, str] = {}
    for event in read_lines(folder.events).records:
        if event.get("attempt") != attempt:
            continue
        if event.get("event") == "attempt_ended":
            told = event
        elif event.get("event") == "node_excluded":
            bad[str(event.get("excluded"))] = str(event.get("reason") or "")
    cause = _first_line(str(told.get("cause") or "").strip())
    if told and cause and not cause.startswith("unknown"):
        return _named(cause, told.get("rank"), told.get("node"))
    return None if told or attempt is None else _of_preflight(folder.attempt_logs(attempt) / "preflight", bad)


def _named(cause: str, rank: Any, node: Any) -> str:
    """`rank 3 on node2: ...`; the node of the event is the cause's, empty where nobody knows it."""
    where = str(node or "")
    if cause.startswith("rank "):
        return cause
    if isinstance(rank, int):
        return f"rank {rank} on {where}: {cause}" if where else f"rank {rank}: {cause}"
    return f"{where}: {cause}" if where and where not in cause else cause


def _of_preflight(place: Path, excluded: Mapping[str, str]) -> str | None:
    """The first node that the check before the start found bad, and how many more there were.

    place: what the check wrote of this attempt; excluded: what the script then wrote of nodes.
    """
    bad: dict[str, str] = {}
    for path in [*sorted(place.glob("*.failed")), place / "verdict"]:
        try:
            text = read_plain(path, _LAST_BYTES).decode("utf-8", errors="replace")
        except OSError:
            continue  # no check, or one that found nothing
        if path.suffix == ".failed":
            bad[path.stem] = _first_line(text.strip())
            continue
        for line in text.splitlines():
            node, _, verdict = line.partition(" ")
            if verdict.startswith("bad "):
                bad.setdefault(node, verdict.removeprefix("bad "))
    for node, reason in excluded.items():
        bad.setdefault(node, reason)
    if not bad:
        return None
    node, reason = next(iter(bad.items()))
    more = f" (and {len(bad) - 1} more: {place})" if len(bad) > 1 else ""
    return f"{node}: {reason}{more}"


def _of_events(folder: RunFolder, attempt: int | None) -> list[_Found]:
    """The newest start of the ranks first: what ended an earlier one, after which torchrun went on, ended no job."""
    starts: list[list[_Found]] = [[]]
    for event in read_lines(folder.events).records:
        if event.get("attempt") != attempt:
            continue
        if event.get("event") == "rank_started":
            starts.append([])
        elif event.get("event") == "error":
            kind = event.get("kind", "error")
            message = str(event.get("message", "")).strip()
            line = f"rank {event.get('rank', '?')} on {event.get('node', '?')}: {kind}: {_first_line(message)}"
            starts[-1].append(_Found(line, bool(_CONSEQUENCE.search(f"{kind}: {message}"))))
        elif event.get("event") == "hang":
            starts[-1].append(_Found(_hang(event), False))
    return [each for found in reversed(starts) for each in found]


def _first_line(message: str) -> str:
    first, _, rest = message[:_LINE].partition("\n")
    return f"{first.rstrip()} (more in events.jsonl)" if rest else first


def _hang(event: Mapping[str, Any]) -> str:
    """The ranks that the others waited for; without any, a collective itself did not end."""
    ranks, nodes = event.get("ranks"), event.get("nodes")
    both = list(zip(ranks, nodes, strict=False)) if isinstance(ranks, list) and isinstance(nodes, list) else []
    more = f" and {len(both) - 1} more" if len(both) > 1 else ""
    who = f"rank {both[0][0]} on {both[0][1]}{more}" if both else "no rank is behind the others"
    where = f"{event.get('phase', '?')} at step {event.get('step', '?')}"
    return f"{who}: hang: no progress in {where} for {event.get('waited', '?')} s"


def _of_logs(folder: RunFolder, attempt: int | None) -> Iterator[_Found]:
    for path, text in _logs(folder, attempt):
        for line in _lines(text):
            exception, ours = _EXCEPTION.match(line), _OURS.match(line)
            if exception and not _TORCHRUN.search(line):
                rank = f"rank {exception['rank']} on " if exception["rank"] else ""
                what = exception["what"]
                yield _Found(f"{rank}{path.stem}: {what} (in {path})", bool(_CONSEQUENCE.search(what)))
            elif ours:
                yield _Found(f"{path.stem}: {ours['what']} (in {path})", bool(_CONSEQUENCE.search(ours["what"])))


def _of_torchrun(folder: RunFolder, attempt: int | None) -> Iterator[_Found]:
    """Ranks that a signal ended, but for those that were ended because of another one."""
    for path, text in _logs(folder, attempt):
        lines = list(_lines(text))
        for index, line in enumerate(lines):
            if not line.startswith(_ROOT_CAUSE):
                continue
            told = (_ROOT_FACT.match(each) for each in lines[index + 1 : index + 1 + _ROOT_LINES])
            facts = {found[1]: int(found[2]) for found in told if found}
            name = _signal_name(-facts.get("exitcode", 0))
            if name is not None and name not in _ENDED_BY_OTHERS and "rank" in facts:
                why = " (out of memory?)" if name == "SIGKILL" else ""
                yield _Found(f"rank {facts['rank']} on {path.stem}: killed by {name}{why} (in {path})", False)


def _lines(text: str) -> Iterator[str]:
    """Those that are not blank, each cut where it is longer than any that tells a cause."""
    return (line[:_LINE] for line in text.splitlines() if line and not line.isspace())


def _signal_name(number: int) -> str | None:
    try:
        return signal.Signals(number).name
    except ValueError:
        return None


def _logs(folder: RunFolder, attempt: int | None) -> Iterator[tuple[Path, str]]:
    """The nodes' logs, of each its last part."""
    for path in Follower(folder, attempt=attempt).node_logs():
        try:
            with open_plain(path) as handle:
                handle.seek(max(0, os.fstat(handle.fileno()).st_size - _LAST_BYTES))
                yield path, handle.read(_LAST_BYTES).decode("utf-8", errors="replace")
        except OSError:
            continue  # removed meanwhile, or no log
