"""How ranks exit: only torchrun's agent sees which signal has killed one, and it tells nobody but its log."""

import signal
from collections.abc import Iterator, Mapping
from typing import Any

from slurmddp.records.rank_events import RankExited
from slurmddp.runtime import torch_private
from slurmddp.runtime.journal import Events


def record(events: Events) -> None:
    """Write the event `rank_exited` for each rank of this node whose failure ended a start.

    Raises UserError if this torch has no place to look at.
    """

    def look(failures: Mapping[int, Any]) -> None:
        for rank, code in first_failures(failures):
            events.write(RankExited(rank, None, _name(-code)) if code < 0 else RankExited(rank, code, None))

    torch_private.see_failures(look)


def first_failures(failures: Mapping[int, Any]) -> Iterator[tuple[int, int]]:
    """Yield rank and exit code (below 0: a signal) of the ranks that failed first, those with a signal before others.

    failures: torchrun's, by rank. It then ends the other ranks of the node with SIGTERM, and after 30 s with SIGKILL:
    these are failures as well, and not of their own.
    """
    first = min((failure.timestamp for failure in failures.values()), default=0)
    codes = {rank: failure.exitcode for rank, failure in failures.items() if failure.timestamp <= first + 1}
    own = {rank: code for rank, code in codes.items() if code != -signal.SIGTERM} or codes
    yield from sorted(own.items(), key=lambda each: (each[1] >= 0, each[0]))


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
