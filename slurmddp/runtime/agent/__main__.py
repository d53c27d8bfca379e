"""torchrun, with the rendezvous backends slurmddp-c10d and slurmddp-static: see the package."""

import os
import sys
from pathlib import Path

from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.run import main as torchrun

from slurmddp.records.rank_events import Forged
from slurmddp.runtime import signing
from slurmddp.runtime.agent import exits, gpu_sampling, handlers
from slurmddp.runtime.environment import own_node
from slurmddp.runtime.errors import UserError
from slurmddp.runtime.journal import Events
from slurmddp.shared.run_folder import RunFolder


def main(words: list[str]) -> None:
    """words: the run folder, then torchrun's own options. A forged rendezvous ends with one message and code 1."""
    try:
        if len(words) < 2:
            raise UserError("usage: python -m slurmddp.runtime.agent RUN_FOLDER TORCHRUN_OPTIONS ...")
        attempt = int(os.environ.get("SLURMDDP_ATTEMPT", "0"))
        folder = RunFolder(Path(words[0]))
        events = Events(folder.events, attempt=attempt, node=own_node(), rank=None)
        handlers.register(signing.load(folder.path), events, folder, os.environ)
        exits.record(events)
        gpu_sampling.start(folder, attempt)
        # The handlers open the ranks' store, one for each start: torch must neither open another one nor share the
        # agents', where ranks would meet addresses of the start before.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        torchrun(words[1:])
    except (UserError, RendezvousStateError, signing.ForgedError, handlers.StopRequested) as error:
        # As node.sh says what it met: `status` looks for such lines.
        print(f"slurmddp: node {own_node()}: {error}", file=sys.stderr)
        if isinstance(error, RendezvousStateError | signing.ForgedError):
            events.write(Forged(str(error)))
        raise SystemExit(1) from None


if __name__ == "__main__":
    main(sys.argv[1:])
