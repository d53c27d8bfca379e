"""`slurmddp check JOB.yaml` on a real Slurm: its limits, its own answer, and when it would start the job."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .cluster import Cluster
from .runs import Alice

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def alice(cluster: Cluster, torch_image: str) -> Alice:
    return Alice(cluster, torch_image)


def checked(alice: Alice, job: str, *options: str) -> tuple[int, dict[str, Any]]:
    done = alice.command("check", job, "--json", *options, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def rules(found: dict[str, Any]) -> dict[str, str]:
    return {each["rule"]: each["message"] for each in found["findings"]}


def test_a_job_is_checked_against_the_cluster_before_it_waits(alice: Alice) -> None:
    job = alice.job_file("checked", resources={"nodes": 2, "time": "10m"})
    queued = alice.cluster.run("login", ["squeue", "--noheader", "--all"]).stdout
    code, found = checked(alice, job, "--partitions")
    assert (code, found["findings"]) == (0, []), found
    assert found["not_checked"] == [] or all("accounting" in why.lower() for why in found["not_checked"]), found
    assert found["start"].startswith("20"), "Slurm says when it would start"
    offers = {each["partition"]: each for each in found["partitions"]}
    assert offers["main"]["start"] and offers["debug"]["refusal"], "ten minutes do not fit into debug"

    code, found = checked(alice, job, "--set", "site=generic", "--partition", "nosuch", "--gpus", "0")
    assert code == 1 and rules(found)["partition-unknown"] == "Slurm knows no partition nosuch"
    assert "invalid partition" in rules(found)["slurm-refuses"].lower()

    large = ("--set", "site=generic", "--partition", "debug", "--gpus", "0", "--set", "resources.cpus_per_node=5")
    code, found = checked(alice, job, *large)
    assert code == 1 and "above the 00:05:00 of partition debug" in rules(found)["partition-limit"]
    assert rules(found)["node-size"] == "5 cores per node are more than the 4 that nodes of partition debug have"
    _, found = checked(alice, job, "--set", "site=generic", "--partition", "main", "--gpus", "4")
    assert rules(found)["node-size"] == "4 GPUs per node are more than the 2 of partition main"
    assert alice.cluster.run("login", ["squeue", "--noheader", "--all"]).stdout == queued, "nothing was submitted"
