"""A plain DDP script on two nodes: its steps are shown, and the rank that does not join is named with its node."""

from __future__ import annotations

import pytest

from .cluster import Cluster
from .runs import Alice

pytestmark = pytest.mark.cluster

SCRIPT = """\
import os, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 101):
    while dist.get_rank() == 1 and step == 50 and not os.path.exists("/home/alice/scripts/release"):
        time.sleep(0.1)
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def test_the_node_of_a_rank_that_does_not_join_is_named(cluster: Cluster, torch_image: str) -> None:
    alice = Alice(cluster, torch_image)
    cluster.write("/home/alice/scripts/plain.py", SCRIPT)
    run = alice.submit(
        "scripts/plain.py", "--site", "testcluster", "--image", torch_image, "--nodes", "2", "--time", "5m",
        "--set", "resources.ranks_per_node=1", "--set", "resources.cpus_per_node=1",
        "--set", "resources.mem_per_node=1500M", "--set", "timeouts.hang=5",
    )  # fmt: skip
    hang = run.wait_for_event("hang_reported", timeout=180)
    ranks = {int(row["rank"]): row["node"] for row in run.lines("events.jsonl") if row["event"] == "rank_started"}
    assert (hang["kind"], hang["ranks"], hang["step"]) == ("behind", [1], 49)
    assert set(hang["nodes"]) | set(ranks.values()) == {"node1", "node2"}, "rank 0 told of its start, rank 1 hangs"
    shown = cluster.run("login", ["slurmddp", "status", run.id], check=False).stdout
    assert f"hang     rank 1 on {hang['nodes'][0]}: hang: no progress in step at step 49" in shown
    cluster.write("/home/alice/scripts/release", "")
    status = run.wait("done")
    assert status["step"] == 100
    assert run.wait_for_event("hang_over")["nodes"] == hang["nodes"]
    stacks = sorted(path.name for path in run.folder.glob("trace/attempt-000/observed-*/hang-1/*.txt"))
    assert stacks == ["rank-00000.txt", "rank-00001.txt"]
