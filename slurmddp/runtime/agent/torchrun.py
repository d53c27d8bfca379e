"""The agent itself, once torch may be imported."""

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.run import main as torchrun

from slurmddp.records.rank_events import Forged, RankExited
from slurmddp.runtime import signing, torch_private
from slurmddp.runtime.agent import forking, gpu_sampling, handlers, pauses
from slurmddp.runtime.environment import own_node
from slurmddp.runtime.errors import UserError
from slurmddp.runtime.journal import Events
from slurmddp.runtime.watch.watch import ECHO
from slurmddp.shared.run_folder import RunFolder


def run(words: list[str], folder: RunFolder, events: Events, template: forking.Template | None) -> None:
    """words: torchrun's own options. A forged rendezvous ends with one message and code 1."""
    try:
        handlers.register(signing.load(folder.path), events, folder, os.environ)
        _record_exits(events)
        torch_private.name_methods_by_frame()
        torch_private.take_echoes_for_one(ECHO)
        torch_private.kill_stopped_ranks()
        gpu_sampling.start(folder, int(os.environ.get("SLURMDDP_ATTEMPT", "0")))
        pauses.start(events.write)
        if template is not None:
            forking.fork_ranks(template, folder.events, events.write)
        torchrun(words)
    except (UserError, RendezvousStateError, signing.ForgedError, handlers.StopRequested) as error:
        # As node.sh says what it met: `status` looks for such lines.
        print(f"slurmddp: node {own_node()}: {error}", file=sys.stderr)
        if isinstance(error, RendezvousStateError | signing.ForgedError):
            events.write(Forged(str(error)))
        raise SystemExit(1) from None


def _record_exits(events: Events) -> None:
    """Write the event `rank_exited` for each rank of this node whose failure ended a start.

    Only torchrun's agent sees which signal has killed a rank, and it tells nobody but its log. Raises UserError if this
    torch has no place to look at.
    """

    def look(failures: Mapping[int, Any]) -> None:
        for rank, code in _first_failures(failures):
            events.write(RankExited(rank, None, _name(-code)) if code < 0 else RankExited(rank, code, None))

    torch_private.see_failures(look)


def _first_failures(failures: Mapping[int, Any]) -> Iterator[tuple[int, int]]:
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
