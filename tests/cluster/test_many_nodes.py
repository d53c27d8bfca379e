"""64 nodes, each a host of its own: submit, preflight, a lost node, a requeue, the sweep. Ranks that only sleep.

Only on the variant of that name (`make variants-test`). The figures, beside those of three nodes: build/many-nodes.txt.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from .cluster import Cluster
from .runs import Alice, Run
from .variant import VARIABLE, variant

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.long,
    pytest.mark.skipif(variant().nodes < 64, reason=f"needs 64 nodes: {VARIABLE}=64-nodes, as in `make variants-test`"),
]
FIGURES = Path(__file__).resolve().parents[2] / "build/many-nodes.txt"
#: Stands in for Python where torchrun would start: it waits for the stop file, or for the end.
AGENT = """#!/bin/bash
[[ "$*" == *slurmddp.runtime.agent* ]] || exec python3 "$@"
until [[ -e "$SLURMDDP_RUN/stop" || -e "$SLURMDDP_RUN/end" ]]; do sleep 1; done
"""


@pytest.fixture(scope="module")
def alice(cluster: Cluster) -> Alice:
    cluster.write("/home/alice/agent", AGENT, mode=0o755)
    cluster.write("/home/alice/scripts/own.py", "")
    return Alice(cluster, image="")


def submit(alice: Alice, nodes: int) -> Run:
    small = ("resources.cpus_per_node=1", "resources.mem_per_node=200M")
    own = ("container.runtime=none", "container.python=/home/alice/agent")
    always = "recovery.requeue=always"  # the script saves nothing
    # What the preflight looks for is there; nothing imports it.
    torch = f"environment.PYTHONPATH={alice.cluster.torch_image_root}/usr/local/lib/python3.11/dist-packages"
    shape = f"resources.nodes={{min: {nodes - 1}, max: {nodes - 1}, spares: 1}}"
    options = [word for setting in (*small, *own, always, torch, shape) for word in ("--set", setting)]
    return alice.submit("scripts/own.py", "--site", "testcluster", "--time", "20m", *options)


def started(run: Run, attempt: int) -> dict:
    return run.wait_for_event("attempt_started", lambda row: row["attempt"] == attempt, timeout=300)


@pytest.mark.parametrize("nodes", [3, 64])
def test_a_run_loses_a_node_is_requeued_and_ends(alice: Alice, fresh_cluster: Cluster, nodes: int) -> None:
    cluster, figures = fresh_cluster, {}
    run = submit(alice, nodes)
    first = started(run, 0)
    begun = run.wait_for_event("job_started")["time"]
    figures["preflight, from the job's start to the ranks' start"] = first["time"] - begun
    assert len(first["nodes"].split()) == nodes - 1

    lost = next(node for node in first["nodes"].split() if node != cluster.job(run.job_id)["BatchHost"])
    killed = time.time()
    cluster.kill_host(lost)
    again = started(run, 1)
    figures["from the loss of a node to the next attempt"] = again["time"] - killed
    assert len(again["nodes"].split()) == nodes - 1 and lost not in again["nodes"].split()
    assert run.wait_for_event("node_excluded")["excluded"] == lost
    cluster.restart_host(lost)

    # What Slurm sends by itself ahead of the time limit, to the batch script alone.
    asked = time.time()
    cluster.run("login", ["scancel", "--batch", "--signal=USR2", run.job_id])
    run.wait_for_event("requeued", timeout=120)
    third = started(run, 2)
    figures["from the signal, over the queue, to the next attempt"] = third["time"] - asked

    cluster.write(f"{run.answer['run_folder']}/end", "")
    ended = time.time()
    over = run.wait_for_event("job_ended", lambda row: row["decision"] == "done", timeout=180)
    figures["from the ranks' end to the job's, with the sweep"] = over["time"] - ended
    cluster.wait_for(lambda: not run.processes(), f"no process is left: {run.processes()}", 60)
    FIGURES.parent.mkdir(exist_ok=True)
    with FIGURES.open("a") as file:
        file.writelines(f"{nodes} nodes: {what}: {seconds:.1f} s\n" for what, seconds in figures.items())
