"""From a job file to its two scripts, in one process, for 1 node and for 4,096 in turn. Prints JSON.

Run by benchmarks/cli.py with the Python of the environment that has slurmddp installed.
"""

from __future__ import annotations

import json
import sys
import time

from slurmddp.job.resolve import Request
from slurmddp.launch.prepare import prepare
from slurmddp.render.scripts import job_script, node_script

#: Renderings in one measurement: one alone is too short for the clock.
REPEAT = 20


def measure(job: str, nodes: int) -> float:
    """CPU seconds of one rendering with this many nodes."""
    request = Request(job, options=[("resources.nodes", nodes, "--nodes")])
    before = time.process_time()
    for _ in range(REPEAT):
        plan = prepare(request, strict=False).plan
        job_script(plan)
        node_script(plan)
    return (time.process_time() - before) / REPEAT


def main() -> None:
    job, pairs = sys.argv[1], int(sys.argv[2])
    sizes = (4096, 1)
    for nodes in sizes:
        measure(job, nodes)  # warm-up
    measured = [[measure(job, nodes) for nodes in sizes] for _ in range(pairs)]
    json.dump(dict(zip(map(str, sizes), zip(*measured, strict=True), strict=True)), sys.stdout)


if __name__ == "__main__":
    main()
