"""python -m slurmddp.runtime.network --node NAME ...: measure with --ranks processes on this node.

Exit code 0, or 1 if a rank failed. The head writes the verdict.
"""

import subprocess
import sys

from slurmddp.runtime.network import settings
from slurmddp.runtime.watch.process_exit import leave


def main(words: list[str]) -> int:
    """Start the further ranks of this node, and become the first one."""
    own = settings.read(words)
    again = [sys.executable, "-m", "slurmddp.runtime.network", *words, "--local"]
    others = range(1, own.ranks) if own.local == 0 else ()
    children = [subprocess.Popen([*again, str(number)]) for number in others]
    from slurmddp.runtime.network.rank import Rank  # imports torch, as the others do meanwhile

    codes = [Rank(own).run(), *(child.wait() for child in children)]
    return int(any(codes))


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
