"""`slurmddp check` on a real Slurm: its limits, its own answer, when it would start the job, and a script put right."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .cluster import Cluster
from .runs import Alice, Run

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

    code, found = checked(alice, job, "--set", "site=generic", "--partition", "nosuch", "--gpus-per-node", "0")
    assert code == 1 and rules(found)["partition-unknown"] == "Slurm knows no partition nosuch"
    assert "invalid partition" in rules(found)["slurm-refuses"].lower()

    large = (
        "--set",
        "site=generic",
        "--partition",
        "debug",
        "--gpus-per-node",
        "0",
        "--set",
        "resources.cpus_per_node=5",
    )
    code, found = checked(alice, job, *large)
    assert code == 1 and "above the 00:05:00 of partition debug" in rules(found)["partition-limit"]
    assert rules(found)["node-size"] == "5 cores per node are more than the 4 that nodes of partition debug have"
    _, found = checked(alice, job, "--set", "site=generic", "--partition", "main", "--gpus-per-node", "4")
    assert rules(found)["node-size"] == "4 GPUs per node are more than the 2 of partition main"
    assert alice.cluster.run("login", ["squeue", "--noheader", "--all"]).stdout == queued, "nothing was submitted"


def test_cores_and_memory_are_the_share_of_the_gpus_on_the_smallest_node(alice: Alice) -> None:
    """Each node has 4 cores and 6000 MiB; node1 and node2 have 2 GPUs, node3 has one."""
    job = alice.job_file(
        "shared", resources={"nodes": 2, "ranks_per_node": 1, "cpus_per_node": None, "mem_per_node": None}
    )
    generic = ("--set", "site=generic", "--partition", "main", "--gpus-per-node", "1")
    done = alice.command("submit", job, "--dry-run", *generic, check=False)
    wanted = ("#SBATCH --cpus-per-task=2\n", "#SBATCH --mem=3000M\n")
    assert all(line in done.stdout for line in wanted), done.stdout + done.stderr
    assert "2 cores and 3000M of memory per node: 1 of 2 GPUs of node" in done.stderr
    _, found = checked(alice, job, *generic)
    assert "slurm-refuses" not in rules(found) and found["start"], "Slurm would start it"


BROKEN = """\
#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --mem=2500M
#SBATCH --time=5
#SBATCH --output=%x-%j.out

apptainer exec IMAGE python3 -m torch.distributed.run \\
    --nnodes=2 --nproc_per_node=2 \\
    --rdzv_backend=c10d --rdzv_endpoint=localhost:29500 --rdzv_conf=join_timeout=20 \\
    train.py
"""
TRAIN = """\
import os, torch
torch.distributed.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
for step in range(3):
    model(torch.randn(8, 4)).mean().backward()
total = torch.ones(1)
torch.distributed.all_reduce(total)
print(f"trained on {os.uname().nodename}: rank {os.environ['RANK']} of {int(total)}", flush=True)
torch.distributed.destroy_process_group()
"""


@pytest.mark.long
def test_a_script_that_starts_on_one_node_at_localhost_trains_on_two_once_it_is_fixed(alice: Alice) -> None:
    cluster, folder = alice.cluster, "/home/alice/fixed"
    cluster.write(f"{folder}/broken.sbatch", BROKEN.replace("IMAGE", alice.image))
    cluster.write(f"{folder}/train.py", TRAIN)
    done = alice.command(
        "check", "--script", f"{folder}/broken.sbatch", "--fix", "--force", "-o", f"{folder}/right.sbatch", check=False
    )
    assert done.returncode == 0 and "[one-node-only]" in done.stderr and "[local-rendezvous]" in done.stderr, done

    def run(script: str) -> tuple[str, set[str]]:
        job = cluster.run("login", ["sbatch", "--parsable", f"{folder}/{script}"], cwd=folder).stdout.strip()
        state = cluster.wait_job(job)
        log = cluster.machine_path(f"{folder}/{script}-{job}.out").read_text()
        return state, {line for line in log.splitlines() if line.startswith("trained on")}

    assert run("broken.sbatch") == ("FAILED", set())
    ranks = {f"trained on node{1 + rank // 2}: rank {rank} of 4" for rank in range(4)}
    state, trained = run("right.sbatch")
    assert state == "COMPLETED" and {line.partition(": ")[2] for line in trained} == {
        line.partition(": ")[2] for line in ranks
    }, trained
    assert len({line.partition(":")[0] for line in trained}) == 2, trained


@pytest.mark.long
def test_the_job_file_of_a_batch_script_trains_its_program_on_both_nodes(alice: Alice) -> None:
    cluster, folder = alice.cluster, "/home/alice/imported"
    cluster.write(f"{folder}/broken.sbatch", BROKEN.replace("IMAGE", alice.image))
    cluster.write(f"{folder}/train.py", TRAIN)

    words = ["slurmddp", "import", "broken.sbatch", "--site", "testcluster", "-o", "job.yaml"]
    made = cluster.run("login", words, cwd=folder, check=False)
    assert made.returncode == 1 and "nodes: 1 -> the job file has: 2" in made.stderr, made
    run = Run(
        cluster, json.loads(cluster.run("login", ["slurmddp", "submit", "job.yaml", "--json"], cwd=folder).stdout)
    )
    run.wait("done")
    logs = run.logs()
    assert all(f"rank {rank} of 4" in logs for rank in range(4)), logs
