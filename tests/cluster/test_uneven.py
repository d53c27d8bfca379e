"""Nodes with different numbers of GPUs in one run, on a real Slurm: `resources.ranks_per_node: auto`.

The test cluster's GPUs are null devices: Slurm counts and hands them out, and the ranks find none and train on cores.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from .cluster import Cluster
from .runs import NO_PREFLIGHT, Alice, Run

pytestmark = pytest.mark.cluster

#: The test cluster as a site whose GPUs are asked for; node1 and node2 have two, node3 has one.
SITE = """\
name: uneven
title: the test cluster, with its GPUs
gpu_request: gpus-per-node
partitions:
  main: {cpus_per_node: 4, mem_per_node: 6000M, max_time: 2h}
job:
  resources: {partition: main}
  network: {interface: ib0}
  paths: {runs: $HOME/runs, cache: $HOME/.cache/slurmddp}
  recovery: {preflight: false} # which would find none of them
"""

#: Says, once for each rank, what torchrun told it.
WORLD = """\
import os
import torch.distributed as dist

dist.init_process_group("gloo")
facts = [os.environ[name] for name in ("SLURMDDP_NODE", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "OMP_NUM_THREADS")]
os.write(1, (" ".join(["RANK", *facts]) + "\\n").encode())
dist.barrier()
dist.destroy_process_group()
"""

STEPS = 12


@pytest.fixture(scope="module")
def alice(cluster: Cluster, torch_image: str) -> Alice:
    """Alice, with a script and a profile of her own."""
    cluster.write("/home/alice/.config/slurmddp/sites/uneven.yaml", SITE)
    cluster.write("/home/alice/uneven/world.py", WORLD)
    return Alice(cluster, torch_image)


def auto(*sbatch_extra: str) -> dict[str, Any]:
    """Resources of a job on two nodes that lets them count."""
    return {
        "nodes": 2, "ranks_per_node": "auto", "cpus_per_node": None, "mem_per_node": None,
        "sbatch_extra": list(sbatch_extra),
    }  # fmt: skip


def script(alice: Alice, site: str, *options: str) -> Run:
    words = [word for option in options for word in ("--set", option)]
    return alice.submit(
        "uneven/world.py", "--site", site, "--image", alice.image, "--nodes", "2", "--time", "5m",
        "--set", "resources.ranks_per_node=auto", *words,
    )  # fmt: skip


def ranks(run: Run) -> Counter[str]:
    """How many ranks said the same line."""
    run.wait("done", timeout=240)
    return Counter(line.split("RANK ")[1] for line in run.logs().splitlines() if "RANK " in line)


def test_two_ranks_and_one_train_on_the_same_samples_as_one(alice: Alice) -> None:
    """Whole nodes are asked for, each starts a rank for each of its GPUs, and the lone rank takes half the batch."""
    train = {"steps": STEPS}
    uneven = {**train, "batch": {"weights": {"node3": 2}}}
    run = alice.submit(alice.job_file("uneven", site="uneven", resources=auto("--exclude=node1"), train=uneven))
    reference = alice.submit(
        alice.job_file("even", resources={"nodes": 1, "ranks_per_node": 1}, train=train, recovery=NO_PREFLIGHT)
    )
    run.wait("done", timeout=240)
    reference.wait("done", timeout=240)

    text = (run.folder / "job.sh").read_text()
    assert "#SBATCH --exclusive" in text and "#SBATCH --gpus-per-node=1" in text
    started = next(row for row in run.lines("events.jsonl") if row["event"] == "started")
    assert (started["world"], started["nodes"]) == (3, 2)

    expected = reference.samples()
    assert sorted(expected) == list(range(1, STEPS + 1))
    assert run.samples() == expected  # the dealing is contiguous: even their order over the ranks is the same
    shares = [dealt(run, rank) for rank in range(3)]
    assert sorted(shares) == [3 * STEPS, 3 * STEPS, 6 * STEPS]
    losses = {row["step"]: row["loss"] for row in reference.metrics()}
    assert {row["step"]: row["loss"] for row in run.metrics()} == pytest.approx(losses, rel=1e-4)


def dealt(run: Run, rank: int) -> int:
    """Samples that a rank was given in all steps."""
    (path,) = (run.folder / "trace/attempt-000").glob(f"rank-*{rank}.jsonl")
    return sum(len(row["ids"]) for row in run.lines(str(path.relative_to(run.folder))))


@pytest.mark.long
def test_gpus_that_the_job_asks_for_itself(alice: Alice) -> None:
    """Three GPUs on two equal nodes: Slurm gives two of one and one of the other (static rendezvous)."""
    extra = "resources.sbatch_extra=[--gpus=3,--exclude=node3,--cpus-per-gpu=1]"
    run = script(alice, "uneven", extra, "resources.mem_per_node=2500M", "launch.rendezvous=static")
    assert "--exclusive" not in (run.folder / "job.sh").read_text()
    found = ranks(run)
    assert sorted(line.split(" ", 1)[1] for line in found.elements()) == ["1 3 1", "2 3 1", "2 3 1"], found
    assert {line.split()[0] for line in found} == {"node1", "node2"}


@pytest.mark.long
def test_ranks_that_share_cores(alice: Alice) -> None:
    """No GPUs: whole nodes of four cores, two threads for each rank."""
    found = ranks(
        script(alice, "testcluster", "environment.OMP_NUM_THREADS=2", "resources.sbatch_extra=[--exclude=node1]")
    )
    assert found == {"node2 2 4 2": 2, "node3 2 4 2": 2}


@pytest.mark.long
def test_an_allocation_of_whole_nodes(alice: Alice) -> None:
    """`slurmddp run`: the step takes the GPUs that came with the nodes."""
    words = ["uneven/world.py", "--site", "uneven", "--image", alice.image, "--nodes", "2"]
    words += ["--set", "resources.ranks_per_node=auto"]
    salloc = ["salloc", "--nodes=2", "--exclusive", "--exclude=node1", "--mem=0", "--ntasks-per-node=1", "--time=5"]
    done = alice.cluster.run("login", [*salloc, "slurmddp", "run", *words], timeout=120)
    found = sorted(line.split("RANK ")[1] for line in done.stdout.splitlines() if "RANK " in line)
    assert found == ["node2 2 3 2", "node2 2 3 2", "node3 1 3 4"], done.stdout + done.stderr


def test_no_gpu_is_said_on_the_node(alice: Alice) -> None:
    """--gres=none is the user's own word on what to ask for; nothing is what Slurm gives."""
    run = script(alice, "uneven", "resources.sbatch_extra=[--gres=none]")
    run.wait("failed")
    assert "Slurm gave this job no GPUs" in (run.folder / "logs/job.log").read_text()
