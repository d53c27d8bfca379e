"""Why a run failed: the first rank that said so, out of events and logs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from slurmddp.runs.cause_rules import Cause, cause_in_logs, rules
from slurmddp.runs.events import read_lines
from slurmddp.runs.layout import RunFolder
from slurmddp.runs.logs import Follower
from slurmddp.shared.files import read_plain

#: Bytes of a file of the preflight, and characters of a message that are shown.
_BYTES = 1_000_000
_LINE = 2000
#: Signals with which torchrun, Slurm and process groups end ranks after another failure.
_CLEANUP = frozenset({"SIGTERM", "SIGINT", "SIGABRT"})


class _Event(NamedTuple):
    """What an event says, as one line. cascade: it may follow from another rank's failure."""

    line: str
    cascade: bool


def find_cause(folder: RunFolder, attempt: int | None) -> str | None:
    """Return one line that names rank, node, error and log; None if nobody wrote one.

    What job.sh found at the end of the attempt comes first: it saw the nodes as well. Then come the events, which the
    bundled entrypoint writes, then the logs. What ranks see after another rank failed counts only where nothing else
    is found. `best_cause` of slurmddp/shell/cause.sh decides the same way.
    """
    if told := _of_script(folder, attempt):
        return told
    events = _of_events(folder, attempt)
    root = next((event.line for event in events if not event.cascade), None)
    if root is not None:
        return root
    if found := _of_logs(folder, attempt, better_than_cascade=bool(events)):
        return found.line
    return events[0].line if events else None


def failing_attempt(folder: RunFolder, attempt: int) -> int:
    """Return the attempt that says why ranks start again and again: the one before the newest until that has failed."""
    waits = attempt > 0 and find_cause(folder, attempt) is None and find_cause(folder, attempt - 1) is not None
    return attempt - waits


def _of_script(folder: RunFolder, attempt: int | None) -> str | None:
    """The cause in the newest attempt_ended, else what the check of the nodes before the start found."""
    told: Mapping[str, Any] = {}
    bad: dict[str, str] = {}
    for event in read_lines(folder.events, folder.path).records:
        if event.get("attempt") != attempt:
            continue
        if event.get("event") == "attempt_ended":
            told = event
        elif event.get("event") == "node_excluded":
            bad[str(event.get("excluded"))] = str(event.get("reason") or "")
    cause = _first_line(str(told.get("cause") or "").strip())
    if told and cause and not cause.startswith("unknown"):
        return _named(cause, told.get("rank"), told.get("node"))
    return None if told or attempt is None else _of_preflight(folder, attempt, bad)


def _named(cause: str, rank: Any, node: Any) -> str:
    """`rank 3 on node2: ...`; the node of the event is the cause's, empty if nobody knows it."""
    where = str(node or "")
    if cause.startswith("rank "):
        return cause
    if isinstance(rank, int):
        return f"rank {rank} on {where}: {cause}" if where else f"rank {rank}: {cause}"
    return f"{where}: {cause}" if where and where not in cause else cause


def _of_preflight(run: RunFolder, attempt: int, excluded: Mapping[str, str]) -> str | None:
    """The first node that the check before the start found bad, and how many more there were.

    excluded: what the script wrote of nodes after the check.
    """
    folder = run.attempt_logs(attempt) / "preflight"
    bad: dict[str, str] = {}
    for path in [*sorted(folder.glob("*.failed")), folder / "verdict"]:
        try:
            text = read_plain(path, _BYTES, run.path).decode("utf-8", errors="replace")
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
    more = f" (and {len(bad) - 1} more: {folder})" if len(bad) > 1 else ""
    return f"{node}: {reason}{more}"


def _of_events(folder: RunFolder, attempt: int | None) -> list[_Event]:
    """The newest start of the ranks first: what ended an earlier one, after which torchrun went on, ended no job."""
    starts: list[list[_Event]] = [[]]
    for event in read_lines(folder.events, folder.path).records:
        if event.get("attempt") != attempt:
            continue
        if event.get("event") == "rank_started":
            starts.append([])
        elif event.get("event") == "error":
            kind = event.get("kind", "error")
            message = str(event.get("message", "")).strip()
            line = f"rank {event.get('rank', '?')} on {event.get('node', '?')}: {kind}: {_first_line(message)}"
            starts[-1].append(_Event(line, rules().is_cascade(f"{kind}: {message}")))
        elif event.get("event") in ("hang", "hang_reported"):
            starts[-1].append(_Event(hang_line(event), False))
        elif event.get("event") == "hang_over":
            starts[-1] = starts[-1][:-1]
        elif event.get("event") == "rank_exited":
            killed = killed_line(event)
            starts[-1].append(_Event(killed or _exit_line(event), killed is None))
    return next((found for found in reversed(starts) if found), [])


def killed_line(event: Mapping[str, Any]) -> str | None:
    """Return `rank 3 on node2: killed by SIGKILL (out of memory?)` for a rank_exited.

    None for signals of a cleanup, and where no signal ended the rank: its log then has the error.
    """
    signal = str(event.get("signal") or "")
    if not signal or signal in _CLEANUP:
        return None
    named = next((name for name in rules().signals.values() if name.split(" ")[0] == signal), signal)
    return f"rank {event.get('rank', '?')} on {event.get('node', '?')}: killed by {named}"


def _exit_line(event: Mapping[str, Any]) -> str:
    how = f"ended by {event['signal']}" if event.get("signal") else f"exited with code {event.get('exit_code', '?')}"
    return f"rank {event.get('rank', '?')} on {event.get('node', '?')}: {how}"


def _first_line(message: str) -> str:
    first, _, rest = message[:_LINE].partition("\n")
    return f"{first.rstrip()} (more in events.jsonl)" if rest else first


def hang_line(event: Mapping[str, Any]) -> str:
    """Return the ranks that the others waited for; without any, a collective itself did not end."""
    ranks, nodes = event.get("ranks"), event.get("nodes")
    both = list(zip(ranks, nodes, strict=False)) if isinstance(ranks, list) and isinstance(nodes, list) else []
    more = f" and {len(both) - 1} more" if len(both) > 1 else ""
    who = f"rank {both[0][0]} on {both[0][1]}{more}" if both else "no rank is behind the others"
    where = f"{event.get('phase', '?')} at step {event.get('step', '?')}"
    return f"{who}: hang: no progress in {where} for {event.get('waited', '?')} s"


def _of_logs(folder: RunFolder, attempt: int | None, *, better_than_cascade: bool) -> Cause | None:
    """Return what the nodes' logs and srun's errors say. RUN/ranks: the node of each rank."""
    logs = Follower(folder, attempt=attempt).node_logs()
    if attempt is not None:
        logs.append(folder.attempt_logs(attempt) / "srun.err")
    try:
        ranks = read_plain(folder.ranks, _BYTES, folder.path).decode("utf-8", errors="replace").split("\n")
    except OSError:
        ranks = []  # no start of the bundled entrypoint came so far
    return cause_in_logs(logs, ranks, folder.path, better_than_cascade=better_than_cascade)
