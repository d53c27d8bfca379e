"""One rank of benchmarks/checkpoint.py, as torchrun starts it."""

import sys
from pathlib import Path

from benchmarks.checkpoint import rank

if __name__ == "__main__":
    rank(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
