"""recovery.heartbeats: a node that is gone is replaced before Slurm knows; one that is stopped for a while stays."""

from __future__ import annotations

import time

import pytest

from .cluster import Cluster
from .runs import ONE_RANK_A_NODE, Alice, story

pytestmark = pytest.mark.cluster


def test_a_stopped_node_stays_and_a_lost_one_is_replaced(fresh_cluster: Cluster, torch_image: str) -> None:
    cluster, alice = fresh_cluster, Alice(fresh_cluster, torch_image)
    job = alice.job_file(
        "beats",
        resources={"nodes": {"min": 1, "max": 2, "spares": 1}, **ONE_RANK_A_NODE},
        train={"steps": 100000, "trace_samples": False},
        checkpoint={"every_steps": 10},
        recovery={"heartbeats": True},
    )
    run = alice.submit(job)
    run.wait_for_step(20)
    heard = run.wait_for_event("heartbeats")
    assert (heard["nodes"], heard["silent"]) == (2, "")
    started = run.wait_for_event("attempt_started")["nodes"].split()
    (node,) = [each for each in started if each != cluster.job(run.job_id)["BatchHost"]]

    stopped = [pid for pid, _ in cluster.processes(node)]
    assert any("guard" in argv for _, argv in cluster.processes(node))
    cluster.run(node, ["kill", "-STOP", *map(str, stopped)], user="root", check=False)
    time.sleep(8)  # longer than the silence of a lost node
    cluster.run(node, ["kill", "-CONT", *map(str, stopped)], user="root", check=False)
    step = run.metrics()[-1]["step"]
    run.wait_for_step(step + 50)
    names = [row["event"] for row in run.lines("events.jsonl")]
    assert "node_excluded" not in names and "attempt_ended" not in names, story(run)

    cluster.kill_host(node)
    try:
        excluded = run.wait_for_event("node_excluded")
        assert (excluded["excluded"], excluded["reason"]) == (node, "no heartbeat for 5 s")
        ended = run.wait_for_event("attempt_ended")
        assert (ended["node"], ended["cause"], ended["decision"]) == (node, "no heartbeat for 5 s", "next"), story(run)
        run.wait_for_event("first_step", lambda row: row["attempt"] == 1)
        nodes = run.wait_for_event("attempt_started", lambda row: row["attempt"] == 1)["nodes"].split()
        assert len(nodes) == 2 and node not in nodes
        cluster.wait_for(lambda: cluster.node_states()[node].startswith("down"), "Slurm has given the node up", 120)
        run.wait_for_step(run.metrics()[-1]["step"] + 50)
        names = [row["event"] for row in run.lines("events.jsonl")]
        assert names.count("attempt_ended") == names.count("node_excluded") == 1, story(run)
        assert cluster.job(run.job_id)["Restarts"] == "0"
    finally:
        cluster.restart_host(node)
        cluster.run("login", ["scancel", run.job_id])
        run.wait("cancelled")
        cluster.wait_nodes()
