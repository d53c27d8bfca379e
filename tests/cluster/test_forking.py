"""recovery.fork on two nodes, in the image: a killed rank and all others come back as forks of each node's template."""

from __future__ import annotations

import pytest

from .cluster import Cluster
from .runs import Alice, Run, story

pytestmark = pytest.mark.cluster

#: The agent's restarts of its ranks share a hash seed with their template: fresh processes draw one each.
SCRIPT = """\
import os, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
print(f"start {os.environ['SLURMDDP_START']} rank {dist.get_rank()} seed {hash('seed')}", flush=True)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while not os.path.exists("/home/alice/scripts/enough"):
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    time.sleep(0.1)
dist.barrier()
os._exit(0)
"""


def seeds(run: Run) -> dict[tuple[str, str], str]:
    """{(start, rank): the seed of its process}."""
    lines = [line for path in run.folder.glob("logs/attempt-*/*.log") for line in path.read_text().splitlines()]
    words = [line[line.index("start ") :].split() for line in lines if "start " in line and " seed " in line]
    return {(start, rank): seed for _, start, _, rank, _, seed in words}


def test_ranks_of_two_nodes_are_forked_again_after_a_kill(cluster: Cluster, torch_image: str) -> None:
    cluster.reset()
    alice = Alice(cluster, torch_image)
    cluster.write("/home/alice/scripts/forked.py", SCRIPT)
    run = alice.submit(
        "scripts/forked.py", "--site", "testcluster", "--image", torch_image, "--nodes", "2", "--time", "5m",
        *("--set", "recovery.fork=true", "--set", "recovery.preflight=false"),
        *("--set", "resources.ranks_per_node=1", "--set", "resources.cpus_per_node=1"),
    )  # fmt: skip
    cluster.wait_for(lambda: len(seeds(run)) == 2, "both ranks began", 120)
    node, pid, _ = min(each for each in run.processes("RANK=1") if "forked.py" in each[2])
    cluster.run(node, ["kill", "-KILL", str(pid)], user="root")
    cluster.wait_for(lambda: len(seeds(run)) == 4, "both ranks began again", 60)
    cluster.write("/home/alice/scripts/enough", "")
    cluster.wait_job(run.job_id, timeout=90)
    told = seeds(run)
    by_rank = [{seed for (_, number), seed in told.items() if number == rank} for rank in ("0", "1")]
    assert [len(each) for each in by_rank] == [1, 1], f"{told}\n{story(run)}"
    assert not [row for row in run.lines("events.jsonl") if row["event"] == "not_forked"], story(run)
