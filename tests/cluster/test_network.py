"""Before the first step: how fast the nodes talk to each other, on real nodes with gloo."""

from __future__ import annotations

import json

import pytest

from .cluster import Cluster
from .runs import Alice

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def alice(cluster: Cluster, torch_image: str) -> Alice:
    return Alice(cluster, torch_image)


def test_preflight_alone_checks_the_nodes_and_measures_their_network(alice: Alice) -> None:
    """Too slow for the floor that the job sets; nothing is trained, and status has the result."""
    job = alice.job_file("measured", network={"min_bandwidth": 1000})
    done = alice.command("check", job, "--preflight", "--json", check=False, timeout=300)
    assert done.stdout, done.stderr
    told = json.loads(done.stdout)
    assert (done.returncode, told["passed"], told["excluded"]) == (0, True, {}), told
    assert [line for line in told["lines"] if " warn " not in line] == ["node1 ok", "node2 ok"]
    text, measured = told["network"]["text"], told["network"]["measured"]
    assert (measured["result"], measured["backend"], measured["devices"]) == ("low", "gloo", ["ib0"])
    assert 0 < measured["bus_gb_s"] < 1000 and len(measured["speeds"]) > 1
    assert text.startswith("gloo over TCP ib0, bus ") and "not isolated: with two nodes" in text
    status = json.loads(alice.command("status", told["run"], "--json").stdout)
    assert (status["state"], status["network"], status["step"]) == ("done", text, None)
    assert f"network  {text}" in alice.command("status", told["run"]).stdout


@pytest.mark.long
def test_a_clean_cluster_passes_twenty_times_of_twenty(alice: Alice) -> None:
    """Three nodes, with the measurement: nobody is named, in any of them."""
    job = alice.job_file("clean", network={"measure": True}, resources={"nodes": 3})
    found = [json.loads(alice.command("check", job, "--preflight", "--json", timeout=300).stdout) for _ in range(20)]
    wrong = [told for told in found if not told["passed"] or told["excluded"] or told["network"] is None]
    assert not wrong, wrong
    named = [line for told in found for line in told["lines"] if line.split()[1] not in ("ok", "warn")]
    assert not named, named


@pytest.mark.long
def test_the_node_with_the_slow_link_is_named_and_replaced(alice: Alice) -> None:
    """What goes to node3 is throttled to 1 MB/s. The job may run on two nodes, so it continues without it."""
    limits = {"measure": True, "min_bandwidth": 0.01}
    job = alice.job_file("slowed", network=limits, resources={"nodes": "2-3"})
    try:
        alice.cluster.slow_link("node3", None, rate="8mbit")
        done = alice.command("check", job, "--preflight", "--json", check=False, timeout=300)
    finally:
        alice.cluster.slow_link("node3", None)
    assert done.stdout, done.stderr
    told = json.loads(done.stdout)
    assert (done.returncode, list(told["excluded"])) == (0, ["node3"]), told
    reason = told["excluded"]["node3"]
    assert reason.startswith("network: slow network: ") and "with node1" in reason and "with node2" in reason, told
    assert told["network"]["measured"]["result"] == "ok", "measured again, without it"
