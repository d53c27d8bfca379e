"""A sweep: never more points at once than allowed, whatever is requeued; what failed runs again; the best is found."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from .cluster import Cluster
from .runs import Alice, Run

pytestmark = pytest.mark.cluster

SCRIPT = """\
import json, os, sys, time

lr = float(sys.argv[1].removeprefix("--lr="))
time.sleep(5)
if lr == 0.3 and not os.path.exists("/home/alice/scripts/fixed"):
    sys.exit("diverged")
with open(os.environ["SLURMDDP_RUN"] + "/metrics.jsonl", "a") as file:
    file.write(json.dumps({"step": 1, "validation_loss": (lr - 0.1) ** 2}) + "\\n")
"""


def points(alice: Alice) -> list[dict[str, Any]]:
    """The points as `sweep status` shows them, which also ends Slurm's hold after a requeue."""
    return list(json.loads(alice.command("sweep", "status", "last", "--json", check=False).stdout)["points"])


def wait(alice: Alice, *states: str) -> None:
    """Wait until the points have these states."""
    deadline = time.monotonic() + 300
    while tuple(found := [point["state"] for point in points(alice)]) != states:
        assert time.monotonic() < deadline, f"{found}, not {states}"
        time.sleep(1)


def most_at_once(runs: list[Run]) -> int:
    """How many jobs there were at once; one that was requeued counts from its first start to its last end."""
    times = []
    for run in runs:
        rows = run.lines("events.jsonl")
        times.append((next(row["time"] for row in rows if row["event"] == "job_started"), 1))
        times.append(([row["time"] for row in rows if row["event"] == "job_ended"][-1], -1))
    return max(sum(change for _, change in sorted(times)[:count]) for count in range(len(times) + 1))


@pytest.mark.long  # three minutes; tests/unit/commands/test_cli_sweeps.py plays it with a stand-in for sbatch
def test_two_at_a_time_one_requeued_and_one_that_fails_is_run_again(cluster: Cluster, torch_image: str) -> None:
    alice = Alice(cluster, torch_image)
    cluster.write("/home/alice/scripts/swept.py", SCRIPT)
    told = json.loads(alice.command(
        "sweep", "scripts/swept.py", "--site", "testcluster", "--image", torch_image, "--time", "5m", "--json",
        "--set", "resources.ranks_per_node=1", "--set", "resources.cpus_per_node=1",
        "--set", "resources.mem_per_node=1500M", "--set", "recovery.preflight=false",
        "--set", "launch.max_restarts=0", "--set", "recovery.no_progress=1",
        "--grid", "args.lr=0.3,0.1,0.2,0.4", "--at-most", "2",
    ).stdout)  # fmt: skip
    runs = [Run(cluster, answer) for answer in told["submitted"]]
    runs[1].wait_for_event("attempt_started")
    cluster.run("login", ["scontrol", "requeue", runs[1].job_id])
    wait(alice, "failed", "done", "done", "done")
    assert most_at_once(runs) == 2
    assert len([row for row in runs[1].lines("events.jsonl") if row["event"] == "job_started"]) == 2, "it was requeued"
    cluster.write("/home/alice/scripts/fixed", "")
    again = json.loads(alice.command("sweep", "rerun", "last", "--json").stdout)["submitted"]
    assert [answer["name"] for answer in again] == ["swept-1"]
    wait(alice, "done", "done", "done", "done")
    best = json.loads(alice.command("sweep", "best", "last", "--metric", "validation_loss", "--json").stdout)
    assert [point["values"]["args.lr"] for point in best["points"]] == ["0.1", "0.2", "0.3", "0.4"]
