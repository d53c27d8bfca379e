"""`slurmddp tune` as a job on a real Slurm whose link is slowed: there, one node is better than two."""

from __future__ import annotations

import json

import pytest
import yaml

from .cluster import Cluster
from .runs import ONE_RANK_A_NODE, Alice

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def alice(cluster: Cluster, torch_image: str) -> Alice:
    return Alice(cluster, torch_image)


def test_over_a_slow_link_one_node_is_chosen_and_the_network_is_why(alice: Alice) -> None:
    """0.4 MB of gradients at 1 MB/s against some milliseconds of computation."""
    job = alice.job_file(
        "slowed", resources={**ONE_RANK_A_NODE, "time": "20m"}, recovery={"preflight": False},
        train={"model": {"layers": 2, "width": 64}, "batch": {"global": 4, "micro": 1}},
    )  # fmt: skip
    try:
        for node in ("node1", "node2"):
            alice.cluster.slow_link(node, None, rate="8mbit")
        done = alice.command("tune", job, "--json", "-o", "slowed.tuned.yaml", "--force", check=False, timeout=400)
    finally:
        for node in ("node1", "node2"):
            alice.cluster.slow_link(node, None)
    assert done.stdout, done.stderr
    told = json.loads(done.stdout)
    assert (done.returncode, [each for each in told["notes"] if "tensor" not in each]) == (0, []), done.stderr
    assert [(each["nodes"], each["parallel"]) for each in told["points"]] == [(1, "DDP"), (2, "DDP"), (2, "FSDP")]
    one, two, shards = told["points"]
    assert one["samples_per_second"] > 2 * two["samples_per_second"] > 0 < shards["samples_per_second"]
    assert two["parts"]["network"] > 0.5 * sum(two["parts"].values())
    assert 0.2 < two["all_reduce"] < 5
    assert told["limit"] and all(trial["fits"] for trial in told["trials"])  # of the memory that the job asks for
    assert (told["beyond"], told["choice"]["options"]["resources.nodes"]) == (2, "1")
    assert told["choice"]["reasons"][0].startswith("1 node: each one more, up to 2, brings -")
    written = alice.cluster.run("login", ["cat", told["job_file"]], user="alice").stdout
    assert yaml.safe_load(written)["resources"]["nodes"] == 1 and "# - 1 node: " in written
