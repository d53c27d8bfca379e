"""Why a run failed: the first rank that said so, out of events and logs."""

from __future__ import annotations

import re
from collections.abc import Iterator

from slurmddp.report.follow import Follower
from slurmddp.runs.events import read_lines
from slurmddp.runs.layout import RunFolder

# PyTorch writes an uncaught exception with the rank before each line; without a process group it is plain Python's.
_EXCEPTION = re.compile(r"^(?:\[rank(?P<rank>\d+)\]: )?(?P<what>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt)\b.*)$")
_OURS = re.compile(r"^slurmddp: node \S+: (?P<what>.+)$")
# What torchrun says of its workers, and what ranks say of another one that is gone.
_TORCHRUN = re.compile("ChildFailedError|SignalException")
_CONSEQUENCE = re.compile(
    "Connection (closed|reset)|Broken pipe|remote process exited|DistNetworkError|ncclRemoteError|Watchdog caught"
)
_LAST_BYTES = 1_000_000


def find_cause(folder: RunFolder, attempt: int | None) -> str | None:
    """One line that names rank, node, error and log; None where nobody wrote one.

    The bundled entrypoint writes events; of a script of the user's own, the logs of the attempt are searched. A lost
    connection is what the other ranks see of the one that failed: it counts only where nothing else is found.
    """
    found = [*_of_events(folder, attempt), *_of_logs(folder, attempt)]
    return min(found, key=lambda line: bool(_CONSEQUENCE.search(line)), default=None)


def _of_events(folder: RunFolder, attempt: int | None) -> Iterator[str]:
    for event in read_lines(folder.events).records:
        if event.get("event") == "error" and event.get("attempt") == attempt:
            kind = event.get("kind", "error")
            yield f"rank {event.get('rank', '?')} on {event.get('node', '?')}: {kind}: {event.get('message', '')}"


def _of_logs(folder: RunFolder, attempt: int | None) -> Iterator[str]:
    for path in Follower(folder, attempt=attempt).node_logs():
        with path.open("rb") as handle:
            handle.seek(max(0, path.stat().st_size - _LAST_BYTES))
            lines = handle.read().decode("utf-8", errors="replace").splitlines()
        for line in lines:
            exception, ours = _EXCEPTION.match(line), _OURS.match(line)
            if exception and not _TORCHRUN.search(line):
                rank = f"rank {exception['rank']} on " if exception["rank"] else ""
                yield f"{rank}{path.stem}: {exception['what']} (in {path})"
            elif ours:
                yield f"{path.stem}: {ours['what']} (in {path})"
