"""Which published figures no longer hold: the cheap tables of docs/benchmarks.md, measured again.

    python -m benchmarks.moved [NAME...]

Prints each figure whose median lies beyond both spreads, the published one and its own. Its exit code is 0 whatever
it finds: a busy machine moves times, and the page is written anew by a person, on a quiet one.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence

from benchmarks import cli, images, page, preflight, runs

MEASURE: dict[str, Callable[[], Sequence[page.Figure]]] = {
    "cli": lambda: cli.figures(11)[0],
    "runs": lambda: runs.figures(1_000_000, 1000, 6),
    "images": lambda: images.figures(11)[0],
    "preflight": lambda: preflight.figures(11),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.moved", description="Which published figures moved.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MEASURE)} (default: all)")
    names = parser.parse_args().names or list(MEASURE)
    if unknown := set(names) - set(MEASURE):
        parser.error(f"no table {', '.join(sorted(unknown))}; there are {', '.join(MEASURE)}")
    text = page.PAGE.read_text(encoding="utf-8")
    for name in names:
        try:
            lines = page.moved(page.published(text, name), MEASURE[name]())
        except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
            print(f"benchmarks.{name}: not measured: {error}", flush=True)
            continue
        print(f"benchmarks.{name}: {'as published' if not lines else ''}", *lines, sep="\n  ", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
