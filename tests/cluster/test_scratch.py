"""What bob, another user of the same nodes, can do with the folder that alice's jobs use on each node."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .cluster import Cluster
from .runs import Alice

SCRATCH = "/tmp/slurmddp-1000"
HERS = "/home/alice/hers"
#: Mode, owner and path of a folder and of all that lies in it.
LIST = "find {} -printf '%m %u %p\\n'"


@pytest.fixture
def planted(cluster: Cluster) -> Iterator[None]:
    """Bob made the folder first: on node1 as a folder of his, on node2 as a link to a folder of hers."""
    cluster.sh("login", f"mkdir -m 755 {HERS}")
    for node in cluster.nodes:
        cluster.sh(node, f"rm -rf {SCRATCH}", user="root")  # of alice's earlier runs
    cluster.sh("node1", f"mkdir -m 777 {SCRATCH}", user="bob")
    cluster.sh("node2", f"ln -s {HERS} {SCRATCH}", user="bob")
    yield
    for node in ("node1", "node2"):
        cluster.sh(node, f"rm -rf {SCRATCH}", user="root")
    cluster.sh("login", f"rm -r {HERS}")


@pytest.mark.usefixtures("planted")
def test_a_node_where_bob_made_the_folder_first_fails_and_writes_nothing_into_it(
    cluster: Cluster, torch_image: str
) -> None:
    alice = Alice(cluster, torch_image)
    run = alice.submit(alice.job_file("planted", train={"steps": 1}))
    run.wait("failed")
    rows = run.lines("events.jsonl")
    said = f"preflight: {SCRATCH} is not a folder of yours: another user may have put it there. "
    reasons = {row["excluded"]: row["reason"] for row in rows if row["event"] == "node_excluded"}
    assert reasons.keys() == {"node1", "node2"} and all(text.startswith(said) for text in reasons.values()), reasons
    assert not [row for row in rows if row["event"] == "attempt_started"]
    assert cluster.sh("node1", LIST.format(SCRATCH), user="bob").stdout == f"777 bob {SCRATCH}\n"
    assert cluster.sh("login", LIST.format(HERS)).stdout == f"755 alice {HERS}\n"


@pytest.fixture
def open_disk(cluster: Cluster) -> Iterator[str]:
    """A folder on each node in which bob can rename alice's folder, as some sites make their scratch."""
    for node in cluster.nodes:
        cluster.sh(node, "mkdir /open && chmod 777 /open", user="root")
    yield "/open"
    for node in cluster.nodes:
        cluster.sh(node, "rm -rf /open", user="root")


def test_a_disk_on_which_bob_could_replace_the_folder_is_not_used(
    cluster: Cluster, torch_image: str, open_disk: str
) -> None:
    alice = Alice(cluster, torch_image)
    run = alice.submit(alice.job_file("open", train={"steps": 1}, paths={"node": open_disk}))
    run.wait("failed")
    rows = run.lines("events.jsonl")
    reasons = {row["excluded"]: row["reason"] for row in rows if row["event"] == "node_excluded"}
    said = "preflight: other users can replace files in /open (paths.node), by way of: drwxrwxrwx root root /open - "
    assert reasons.keys() == {"node1", "node2"} and all(text.startswith(said) for text in reasons.values()), reasons
    for node in reasons:
        assert cluster.sh(node, "ls -A /open").stdout == ""
