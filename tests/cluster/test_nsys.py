"""`submit --nsys` with the real program, which needs no GPU: it records calls of the C library and NVTX ranges."""

from __future__ import annotations

import shutil

import pytest

from .cluster import Cluster
from .nsys import nsys_folder
from .runs import Alice

pytestmark = [pytest.mark.cluster, pytest.mark.long]

FOLDER = "/home/alice/nsys/target-linux-x64"  # nsys insists on this name
#: What one recording weighs at least, in bytes: an empty one has a few hundred.
RECORDED = 1_000_000


@pytest.fixture
def alice(cluster: Cluster, torch_image: str) -> Alice:
    place = cluster.machine_path(FOLDER)
    if not place.exists():
        shutil.copytree(nsys_folder(), place)
    return Alice(cluster, torch_image)


def test_each_node_is_recorded_while_a_killed_rank_is_replaced(alice: Alice) -> None:
    """The ranks that torchrun starts again are in the same session; the run ends as without nsys."""
    job = alice.job_file("nsys", train={"steps": 1000}, checkpoint={"every_steps": 20})
    binds = ("--set", f"container.binds=[{FOLDER}]", "--set", f"launch.nsys.command={FOLDER}/nsys")
    run = alice.submit(job, "--nsys", *binds, "--set", "launch.nsys.delay=2", "--set", "launch.nsys.duration=15")
    run.wait_for_step(25)
    ((node, process, _),) = run.processes("RANK=1")
    alice.cluster.run(node, ["kill", "-KILL", str(process)], user="root")
    run.wait("done", timeout=300)
    events = run.lines("events.jsonl")
    told = [event for event in events if event["event"] == "nsys_recorded"]
    assert {(event["node"], event["error"]) for event in told} == {("node1", ""), ("node2", "")}, told
    for event in told:
        (path,) = event["files"]
        assert f"trace/attempt-000/nsys-{event['node']}" in path
        assert alice.cluster.machine_path(path).stat().st_size > RECORDED
    assert [event["attempt"] for event in events if event["event"] == "resumed"] == [0], (
        "torchrun started the ranks again"
    )
    alice.cluster.wait_for(lambda: not run.processes(), "nothing of nsys is left behind", 20)
