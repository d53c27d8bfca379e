"""From sbatch to the first training step, against a hand-written script of the same job, on the test cluster.

    python -m benchmarks.launch [--pairs N] [--write]

Brings up a cluster of its own (root only, see tests/cluster/README.md) and takes it down again. Exit code 1
where the target is missed, 2 where nothing could be measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import page
from benchmarks.environments import CHECKOUT
from benchmarks.measure import Comparison, Cost, in_turn
from tests.cluster.cluster import Cluster
from tests.cluster.errors import ClusterError
from tests.cluster.images import make_torch_image

TARGET = 1.05
HOME = "/home/alice"
LOGIN = "login"

#: A model so small that its step takes no time: what is measured is the way to it.
JOB = """\
name: launch
site: testcluster
resources: {nodes: 2, ranks_per_node: 1, cpus_per_node: 1, mem_per_node: 2500M, time: 5m}
container: {image: %(image)s}
train:
  task: lm
  data: {path: %(home)s/text, glob: "*.txt", context: 32}
  model: {layers: 1, heads: 2, width: 32}
  batch: {global: 8, micro: 4}
  steps: 2
  evaluate: {at_end: false}
checkpoint: {at_end: false}
"""

#: What a careful user writes by hand: the same resources, image, program and folder; no more.
HAND_WRITTEN = """\
#!/bin/bash
#SBATCH --job-name=by-hand
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
#SBATCH --mem=2500M
#SBATCH --time=5
#SBATCH --partition=main

run=$1
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export APPTAINERENV_PYTHONPATH=$run/code
export APPTAINERENV_OMP_NUM_THREADS=1
export APPTAINERENV_GLOO_SOCKET_IFNAME=ib0

srun --nodes=2 --ntasks=2 --cpus-per-task=1 --output="$run/%%N.log" \\
  apptainer exec --pwd "$run" --bind "$run:$run" --bind %(home)s/text:%(home)s/text:ro %(image)s \\
  python3 -m torch.distributed.run --nnodes=2 --nproc-per-node=1 \\
  --rdzv-backend=c10d --rdzv-endpoint="$head:29500" --rdzv-id="$SLURM_JOB_ID" \\
  -m slurmddp.runtime.train "$run"
"""

#: Stands before the real sbatch in PATH, for both sides: writes down when it was called.
STAMP = """\
#!/bin/bash
date +%s.%N >"$STAMP"
exec /usr/bin/sbatch "$@"
"""


class Bench:
    """Both sides of the comparison, as alice on the login host."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.environment = {"STAMP": f"{HOME}/stamp"}
        names = {"image": make_torch_image(cluster), "home": HOME}
        cluster.write(f"{HOME}/shim/sbatch", STAMP, mode=0o755)
        cluster.write(f"{HOME}/text/license.txt", (CHECKOUT / "LICENSE").read_text() * 10)
        cluster.write(f"{HOME}/job.yaml", JOB % names)
        cluster.write(f"{HOME}/by-hand.sh", HAND_WRITTEN % names)
        self.count = 0
        self.sources = ""

    def ours(self) -> Cost:
        """`slurmddp submit`."""
        answer = json.loads(self._sh("slurmddp submit --json job.yaml"))
        self.sources = answer["run_folder"]
        return self._first_step(answer["job_id"], answer["run_folder"])

    def by_hand(self) -> Cost:
        """sbatch of the hand-written script, on a folder with the job.json and the code of a run of ours."""
        self.count += 1
        run = f"{HOME}/by-hand-{self.count}"
        self._sh(f"mkdir {run} && cp -r {self.sources}/{{job.json,code}} {run}")
        self._sh(f"cd {run}/code && python3 -m zipfile -e slurmddp.zip .")
        job_id = self._sh(f"sbatch --parsable --output={run}/job.log by-hand.sh {run}").strip()
        return self._first_step(job_id, run)

    def _sh(self, script: str) -> str:
        script = f"export PATH={HOME}/shim:$PATH; {script}"
        return self.cluster.sh(LOGIN, script, cwd=HOME, env=self.environment).stdout

    def _first_step(self, job_id: str, run: str) -> Cost:
        """Wall clock from the call of sbatch to the first line of metrics; returns when the nodes are idle again."""
        state = self.cluster.wait_job(job_id, timeout=120)
        folder = self.cluster.machine_path(run)
        if state != "COMPLETED":
            raise ClusterError(f"job {job_id} is {state}:\n{_logs(folder)}")
        self.cluster.wait_nodes()
        with (folder / "metrics.jsonl").open() as lines:
            first = json.loads(lines.readline())
        called = float(self.cluster.machine_path(f"{HOME}/stamp").read_text())
        time.sleep(1)  # the nodes' last processes
        return Cost(cpu=0.0, wall=float(first["time"]) - called)


def _logs(folder: Path) -> str:
    return "\n".join(path.read_text(errors="replace")[-3000:] for path in sorted(folder.rglob("*.log")))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.launch", description="sbatch to first step.")
    parser.add_argument("--pairs", type=int, default=7, metavar="N", help="default: %(default)s")
    page.options(parser)
    options = parser.parse_args()
    try:
        with Cluster.started("benchmark") as cluster:
            bench = Bench(cluster)
            ours, theirs = in_turn(_shown("ours", bench.ours), _shown("by hand", bench.by_hand), options.pairs)
    except ClusterError as error:
        print(f"cannot measure: {error}", file=sys.stderr)
        return 2
    title = "sbatch to first step, wall clock"
    comparison = Comparison(title, "s", [cost.wall for cost in ours], [cost.wall for cost in theirs], TARGET)
    about = f"the test cluster's 2 nodes on this machine; {options.pairs} pairs"
    return page.finish("launch", [page.Figure.of(title, comparison)], about, write=options.write)


def _shown(name: str, measure: Callable[[], Cost]) -> Callable[[], Cost]:
    """The same, telling how far it is: a pair takes half a minute."""

    def told() -> Cost:
        cost = measure()
        print(f"{name} {cost.wall:.2f} s", file=sys.stderr, flush=True)
        return cost

    return told


if __name__ == "__main__":
    sys.exit(main())
