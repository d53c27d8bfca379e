"""torchrun, with the rendezvous backends slurmddp-c10d and slurmddp-static: see the package."""

import os
import socket
import sys
from pathlib import Path

from slurmddp.records.rank_events import NotWarm
from slurmddp.runtime.agent import forking, warm
from slurmddp.runtime.environment import own_node
from slurmddp.runtime.journal import Events
from slurmddp.shared.run_folder import RunFolder


def main(words: list[str], template_of_warm: tuple[socket.socket, int] | None = None) -> None:
    """words: the run folder, then torchrun's own options; template_of_warm: in a fork of a warm process."""
    if len(words) < 2:
        usage = "usage: python -m slurmddp.runtime.agent RUN_FOLDER TORCHRUN_OPTIONS ..."
        print(f"slurmddp: node {own_node()}: {usage}", file=sys.stderr)
        raise SystemExit(1)
    folder = RunFolder(Path(words[0]))
    events = Events(folder.events, attempt=int(os.environ.get("SLURMDDP_ATTEMPT", "0")), node=own_node(), rank=None)
    if warm.is_wanted() and template_of_warm is None:
        _start_warm(words, events)
    # The handlers open the ranks' store, one for each start: torch must neither open another one nor share the
    # agents', where ranks would meet addresses of the start before.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    template = forking.template(words[1:], folder.events, events.write, template_of_warm)
    from slurmddp.runtime.agent import torchrun  # with torch, which the template imports meanwhile

    torchrun.run(words[1:], folder, events, template)


def _start_warm(words: list[str], events: Events) -> None:
    """Become the warm process, in its step; else leave the rest to a fork of it. Returns where that is not possible."""
    try:
        if warm.is_parent():
            from slurmddp.runtime.agent import warm_parent

            warm_parent.become(words)
        warm.be_agent(words)
    except forking.NotPossible as error:
        if warm.is_parent():
            print(f"slurmddp: node {own_node()}: {error}", file=sys.stderr)
            raise SystemExit(1) from None
        events.write(NotWarm(str(error)))


if __name__ == "__main__":
    main(sys.argv[1:])
