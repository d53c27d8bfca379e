"""python -m slurmddp.runtime.preflight RUN: exit code 0, 3 where the head found a node that cannot train, else 1."""

import asyncio
import os
import sys
from pathlib import Path

from slurmddp.runtime.errors import UserError
from slurmddp.runtime.preflight import node_settings
from slurmddp.runtime.preflight.head import Head
from slurmddp.runtime.preflight.node import report


def main(words: list[str]) -> int:
    """words: the run folder."""
    try:
        if len(words) != 1:
            raise UserError("usage: python -m slurmddp.runtime.preflight RUN")
        settings = node_settings.read(Path(words[0]))
        # Not asyncio.run, which waits for the threads: one may be stuck in a file system.
        own = Head(settings).run() if settings.is_head else report(settings)
        return asyncio.new_event_loop().run_until_complete(own)
    except (UserError, OSError) as error:
        print(f"slurmddp: preflight: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
