"""One rank of benchmarks/step.py, as torchrun starts it."""

import sys
from pathlib import Path

from benchmarks.step import rank

if __name__ == "__main__":
    rank(Path(sys.argv[1]))
