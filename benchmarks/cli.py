"""The command line's cost, against torchx and against importing typer.

    python -m benchmarks.cli [--pairs N] [--write]

Exit code 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks import environments, page
from benchmarks.measure import Comparison, in_turn, run

#: torchx's `-j 4x8`: 4 nodes with 8 GPUs each.
JOB = """\
name: main
site: generic
resources: {nodes: 4, gpus_per_node: 8, cpus_per_node: 64, time: 12h, partition: gpu}
container: {image: image.sif}
train: {script: main.py}
"""

#: What a file needs to be taken for an image.
SIF = "#!/usr/bin/env run-singularity\n\0SIF_MAGIC\0and the rest"

DRY_RUN_TARGET = 0.9
HELP_TARGET = 1.2
#: "The same for 1 node and 4,096", with room for the clock.
RENDER_TARGET = 1.1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cli", description="The cost of the command line.")
    parser.add_argument("--pairs", type=int, default=21, metavar="N", help="pairs of each (default: %(default)s)")
    page.options(parser)
    asked = parser.parse_args()
    found, about = figures(asked.pairs)
    return page.finish("cli", found, about, write=asked.write)


def figures(pairs: int) -> tuple[list[page.Figure], str]:
    """Measure the table, and say what it was measured with."""
    ours, torchx = environments.ours(), environments.torchx()
    packages = ("typer", "pydantic", "jinja2", "pyyaml")
    about = (
        f"Python {sys.version.split()[0]}, {environments.versions(ours / 'python', *packages)}; "
        f"{environments.versions(torchx / 'python', 'torchx')}; {pairs} pairs"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.yaml").write_text(JOB)
        (folder / "main.py").write_text("")
        (folder / "image.sif").write_text(SIF)
        sbatch = folder / "bin" / "sbatch"  # a dry run refuses a job where there is none
        sbatch.parent.mkdir()
        sbatch.write_text("#!/bin/sh\nexit 1\n")
        sbatch.chmod(0o755)
        dry_run = [str(ours / "slurmddp"), "submit", "job.yaml", "--dry-run"]
        peer = [
            str(torchx / "torchx"),
            "run",
            "-s",
            "slurm",
            "--dryrun",
            "dist.ddp",
            "-j",
            "4x8",
            "--script",
            "main.py",
        ]
        check(dry_run, folder, "#SBATCH --nodes=4")
        check(peer, folder, "#SBATCH")
        typer = [str(ours / "python"), "-c", "import typer"]
        found = [
            *compare("dry run", dry_run, peer, folder, pairs, DRY_RUN_TARGET),
            *compare("help", [str(ours / "slurmddp"), "--help"], typer, folder, pairs, HELP_TARGET),
            rendering(ours / "python", folder, pairs),
        ]
    for comparison in found:
        print(f"\n{comparison.report()}")
    return [page.Figure.of(comparison.title, comparison) for comparison in found], about


def _environment(folder: Path) -> dict[str, str]:
    kept = environments.environment()
    return {**kept, "PATH": f"{folder / 'bin'}:{kept['PATH']}"}


def check(command: Sequence[str], folder: Path, wanted: str) -> None:
    """Raises RuntimeError where a command does not print a batch script: its time would mean nothing."""
    done = subprocess.run(command, cwd=folder, env=_environment(folder), capture_output=True, text=True)
    if done.returncode != 0 or wanted not in done.stdout:
        raise RuntimeError(f"{' '.join(command)} printed no batch script:\n{done.stdout}{done.stderr}")


def compare(
    title: str, ours: Sequence[str], theirs: Sequence[str], folder: Path, pairs: int, target: float
) -> list[Comparison]:
    """CPU seconds, which the target is about, and wall-clock seconds."""
    start = partial(run, cwd=folder, environment=_environment(folder))
    mine, others = in_turn(lambda: start(ours), lambda: start(theirs), pairs)
    return [
        Comparison(f"{title}, CPU", "s", [cost.cpu for cost in mine], [cost.cpu for cost in others], target),
        Comparison(f"{title}, wall clock", "s", [cost.wall for cost in mine], [cost.wall for cost in others]),
    ]


def rendering(python: Path, folder: Path, pairs: int) -> Comparison:
    """The job resolved and rendered for 4,096 nodes and for 1, in one process."""
    script = Path(__file__).with_name("rendering.py")
    done = subprocess.run(
        [python, script, "job.yaml", str(pairs)],
        cwd=folder, env=environments.environment(), check=True, capture_output=True, text=True,
    )  # fmt: skip
    measured = json.loads(done.stdout)
    large, small = ([second * 1000 for second in measured[nodes]] for nodes in ("4096", "1"))
    return Comparison("rendering, CPU", "ms", large, small, RENDER_TARGET)


if __name__ == "__main__":
    sys.exit(main())
