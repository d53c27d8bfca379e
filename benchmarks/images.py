"""What `slurmddp build-image` costs beside the build: a definition, and finding that there is nothing to do.

    python -m benchmarks.images [--pairs N] [--bin FOLDER] [--write]

Definitions are measured beyond start-up: the same command with a file that is not there, which it refuses once it has
read its arguments. Both have loaded Jinja and PyYAML. What is left is reading, checking and rendering, pydantic's
validator and Jinja's compiler included. Exit code 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks import environments, page
from benchmarks.measure import Comparison, in_turn, run

#: Stands for Apptainer: an image that says that it is one.
BUILDER = r"""#!/bin/sh
case $1 in
  --version) echo "apptainer version 1.4.5" ;;
  inspect) echo '{"data": {"attributes": {"labels": {}}}, "type": "container"}' ;;
  exec) exit 255 ;;
  build) for last; do image=$before before=$last; done
    printf '#!/usr/bin/env run-singularity\n\000SIF_MAGIC\00001\00000\000' > "$image" ;;
esac
"""
DOCKERFILE = """\
FROM docker.io/library/debian:12 AS made
ARG WORD=salt
RUN echo $WORD > /word
FROM docker.io/library/debian:12
ENV A=1 B="two words"
WORKDIR /srv
COPY --from=made /word /srv/
COPY main.py /srv/
RUN apt-get update && apt-get install -y python3
ENTRYPOINT ["python3", "/srv/main.py"]
"""
START = "import jinja2, yaml; from slurmddp.commands.app import main; main()"
IMAGE_BYTES = 10 * 2**30
RENDER_TARGET = 50.0
NOTHING_TARGET = 300.0


@dataclass(frozen=True)
class Beyond:
    """Milliseconds of a command, and of start-up, pair by pair; `target`: what the median difference may be at most."""

    title: str
    ours: Sequence[float]
    start: Sequence[float]
    target: float

    @property
    def differences(self) -> list[float]:
        return [mine - other for mine, other in zip(self.ours, self.start, strict=True)]

    @property
    def holds(self) -> bool:
        return statistics.median(self.differences) <= self.target

    def report(self) -> str:
        """Several lines for people."""
        spread = Comparison(self.title, "ms", self.ours, self.start).report()
        found = self.differences
        middle = f"min {min(found):.1f}  median {statistics.median(found):.1f}  max {max(found):.1f} ms"
        met = "holds" if self.holds else "MISSED"
        return f"{spread}\n  beyond  {middle}\n  target  at most {self.target:.0f} ms beyond start-up: {met}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.images", description="The cost of images, unbuilt.")
    parser.add_argument("--pairs", type=int, default=21, metavar="N", help="pairs of each (default: %(default)s)")
    parser.add_argument("--bin", type=Path, metavar="FOLDER", help="an environment's bin (default: one that is made)")
    page.options(parser)
    options = parser.parse_args()
    found, about = figures(options.pairs, options.bin)
    return page.finish("images", found, about, write=options.write)


def figures(pairs: int, bin_folder: Path | None = None) -> tuple[list[page.Figure], str]:
    """Measure the table, and say what it was measured with."""
    bin_folder = bin_folder or environments.ours()
    spython = environments.versions(bin_folder / "python", "spython")
    about = f"Python {sys.version.split()[0]}, {spython}; {pairs} pairs"
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(Path(name), bin_folder / "slurmddp")
        found = [
            bench.rendering("definition of a recipe", "--recipe", "ngc-pytorch"),
            bench.rendering("definition of a Dockerfile", "--dockerfile", "Dockerfile"),
        ]
        comparisons = [measure(pairs) for measure in found]
        nothing = bench.nothing_to_do(pairs)
    for comparison in comparisons:
        print(f"\n{comparison.report()}")
    rows = [page.Figure(each.title, each.differences, "ms", each.target) for each in comparisons]
    title = f"nothing to do, {IMAGE_BYTES >> 30} GiB, wall clock of the whole command"
    return [*rows, page.Figure(title, nothing, "ms", NOTHING_TARGET)], about


class Bench:
    """A folder with all that the commands need; nothing of the user's own is read."""

    def __init__(self, folder: Path, program: Path) -> None:
        self.folder = folder
        self.program = str(program)
        self.loaded = [str(program.with_name("python")), "-c", START]
        for made in ("home", "bin", "images"):
            (folder / made).mkdir()
        (folder / "Dockerfile").write_text(DOCKERFILE)
        (folder / "main.py").write_text("")
        (folder / "bin/apptainer").write_text(BUILDER)
        (folder / "bin/apptainer").chmod(0o755)
        path = f"{folder / 'bin'}:{os.environ.get('PATH', '/usr/bin:/bin')}"
        self.environment = {**environments.environment(), "HOME": str(folder / "home"), "PATH": path}
        self._run = partial(run, cwd=folder, environment=self.environment)

    def rendering(self, title: str, option: str, name: str) -> partial[Beyond]:
        """To be called with the number of pairs; the command is tried once before. option, name: what is rendered."""
        shown = self._output("build-image", option, name, "--dry-run")
        if "Bootstrap: docker\n" not in shown:
            raise RuntimeError(f"build-image {option} {name} printed no definition:\n{shown}")
        return partial(self._beyond, title, option, name)

    def _beyond(self, title: str, option: str, name: str, pairs: int) -> Beyond:
        command = [*self.loaded, "build-image", option, name, "--dry-run"]
        absent = [*self.loaded, "build-image", option, "./absent.yaml", "--dry-run"]
        refused = ["sh", "-c", '"$@"; [ $? = 2 ]', "sh", *absent]
        mine, start = in_turn(lambda: self._run(command), lambda: self._run(refused), pairs)
        ours = [cost.cpu * 1000 for cost in mine]
        return Beyond(f"{title}, CPU beyond start-up", ours, [cost.cpu * 1000 for cost in start], RENDER_TARGET)

    def nothing_to_do(self, runs: int) -> list[float]:
        """Milliseconds of the whole command for an image that is there, of 10 GiB that nobody has to read."""
        base = self.folder / "base.sif"
        base.write_bytes(b"#!/usr/bin/env run-singularity\n\0SIF_MAGIC\x00" + b"01\x0000\x00")
        words = ("build-image", "large.sif", "--base", "base.sif")
        image = Path(self._output(*words).strip())
        lock = image.with_name(f"{image.name}.lock.json")
        os.truncate(image, IMAGE_BYTES)  # a sparse file: it takes no room, and reading it takes as long
        state = image.stat()
        facts = {**json.loads(lock.read_text()), "bytes": state.st_size, "mtime": state.st_mtime}
        lock.write_text(json.dumps(facts))
        if "up to date: " not in self._output(*words, streams="both"):
            raise RuntimeError("the image was built again")
        return [self._run([self.program, *words]).wall * 1000 for _ in range(runs + 1)][1:]

    def _output(self, *words: str, streams: str = "out") -> str:
        done = subprocess.run(
            [self.program, *words], cwd=self.folder, env=self.environment, check=False, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}: {done.stderr}")
        return done.stdout + (done.stderr if streams == "both" else "")


if __name__ == "__main__":
    sys.exit(main())
