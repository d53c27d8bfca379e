"""torchrun, with the rendezvous backends slurmddp-c10d and slurmddp-static: see the package."""

import os
import sys
from pathlib import Path

from slurmddp.runtime.agent import forking
from slurmddp.runtime.environment import own_node
from slurmddp.runtime.journal import Events
from slurmddp.shared.run_folder import RunFolder


def main(words: list[str]) -> None:
    """words: the run folder, then torchrun's own options."""
    if len(words) < 2:
        usage = "usage: python -m slurmddp.runtime.agent RUN_FOLDER TORCHRUN_OPTIONS ..."
        print(f"slurmddp: node {own_node()}: {usage}", file=sys.stderr)
        raise SystemExit(1)
    folder = RunFolder(Path(words[0]))
    events = Events(folder.events, attempt=int(os.environ.get("SLURMDDP_ATTEMPT", "0")), node=own_node(), rank=None)
    # The handlers open the ranks' store, one for each start: torch must neither open another one nor share the
    # agents', where ranks would meet addresses of the start before.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    template = forking.template(words[1:], folder.events, events.write)
    from slurmddp.runtime.agent import torchrun  # with torch, which the template imports meanwhile

    torchrun.run(words[1:], folder, events, template)


if __name__ == "__main__":
    main(sys.argv[1:])
