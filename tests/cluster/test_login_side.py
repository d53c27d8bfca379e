"""What the login side does about a run that goes back to the queue: chains, the hold, nodes that are missing."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from .cluster import Cluster
from .runs import NO_PREFLIGHT, Alice, Run

SITE = Path(__file__).resolve().parents[2] / "site_configs" / "testcluster.yaml"
LONG = {"steps": 100000}

#: Programs with the Python API.
SUBMIT = """import json, sys, slurmddp
run = slurmddp.submit(sys.argv[1])
print(json.dumps({"run_id": run.id, "run_folder": str(run.folder), "job_id": run.status().job_id}))"""
AWAIT = """import json, sys, slurmddp
run = slurmddp.Run(sys.argv[1])
print(json.dumps([run.wait().state, [row["loss"] for row in run.metrics()]]))"""


@pytest.fixture(scope="module")
def alice(cluster: Cluster, torch_image: str) -> Alice:
    profile = SITE.read_text().replace("name: testcluster", "name: chained\nrequeue: chain", 1)
    cluster.write("/home/alice/.config/slurmddp/sites/chained.yaml", profile)
    return Alice(cluster, torch_image)


def test_a_chain_of_jobs_is_one_run(alice: Alice) -> None:
    run = alice.submit(
        alice.job_file("chain", site="chained", resources={"nodes": 1}, train=LONG, recovery=NO_PREFLIGHT)
    )
    assert "#SBATCH --no-requeue" in (run.folder / "job.sh").read_text()
    run.wait_for_step(5)
    # What Slurm sends ahead of the time limit
    alice.cluster.run("login", ["scancel", "--batch", "--signal=USR2", run.job_id])
    chained = run.wait_for_event("requeued")
    assert (chained["how"], chained["reason"]) == ("chain", "time limit"), chained
    run.wait_for_event("resumed", lambda row: row["attempt"] == 1, 90)
    code, status = run.status()
    assert (code, status["state"], status["job_id"]) == (3, "running", chained["next_job"])
    by_number = alice.command("status", chained["next_job"], check=False)
    assert run.id in by_number.stdout, by_number.stderr
    said = alice.command("cancel", run.id, "--wait", timeout=90).stdout
    assert f"Job {chained['next_job']} is saving and will exit" in said and "cancelled by you, checkpoint saved" in said
    ledger = json.loads(alice.command("status", run.id, "--time", "--json", check=False).stdout)
    assert (ledger["jobs"], ledger["attempts"], ledger["recovered"]) == (2, 2, 0)
    assert round(sum(ledger["seconds"].values()), 3) == ledger["wall_seconds"]


#: The real sbatch, whose answer gets lost on its way, as with a connection that breaks.
DEAF_SBATCH = """#!/bin/bash
/usr/bin/sbatch "$@" >/dev/null
echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2
exit 1
"""


def test_a_job_whose_number_got_lost_is_found_and_not_submitted_twice(alice: Alice) -> None:
    alice.cluster.write("/home/alice/deaf/sbatch", DEAF_SBATCH, mode=0o755)
    job = alice.job_file("deaf", resources={"nodes": 1, "time": "10m"}, train=LONG, recovery=NO_PREFLIGHT)
    done = alice.cluster.sh("login", f"PATH=~/deaf:$PATH slurmddp submit {job} --json", check=False, timeout=120)
    queued = alice.cluster.run("login", ["squeue", "--noheader", "--format=%i %k %j"]).stdout.splitlines()
    (line,) = [line for line in queued if "deaf" in line]
    assert done.returncode == 0, done.stderr
    run = Run(alice.cluster, json.loads(done.stdout))
    assert run.job_id == line.split()[0], (line, done.stdout, done.stderr)
    run.wait_for_step(1)
    alice.command("cancel", run.id, "--now")
    run.wait("cancelled")


@pytest.mark.long
def test_cancel_takes_the_waiting_job_of_a_chain_too(alice: Alice) -> None:
    job = alice.job_file("successor", site="chained", resources={"nodes": 1}, train=LONG)
    run = alice.submit(job)
    run.wait_for_step(1)
    # As job.sh would, but with the job before it still at work.
    folder = run.answer["run_folder"]
    dependency = f"--dependency=afterany:{run.job_id}"
    command = ["sbatch", "--parsable", dependency, f"--output={folder}/logs/job.log", f"{folder}/job.sh", folder]
    following = alice.cluster.run("login", command).stdout.strip()
    line = {"time": 0, "event": "requeued", "attempt": 0, "how": "chain", "next_job": following, "reason": "time limit"}
    with (run.folder / "events.jsonl").open("a") as events:
        events.write(json.dumps(line) + "\n")
    assert run.status()[1]["job_id"] == following
    said = alice.command("cancel", run.id).stdout
    assert f"Cancelled job {following}" in said and f"Job {run.job_id} is saving and will exit" in said
    alice.cluster.wait_job(run.job_id)
    assert alice.cluster.job_state(following) == "CANCELLED"
    assert not (run.folder / "logs/attempt-001").exists()


@pytest.mark.long
def test_the_next_command_ends_the_hold_where_nothing_of_the_job_is_left(alice: Alice, fresh_cluster: Cluster) -> None:
    run = alice.submit(alice.job_file("gone", resources={"nodes": 1}, train=LONG))
    run.wait_for_step(5)
    (node,) = {str(row["node"]) for row in run.lines("events.jsonl") if row["event"] == "job_started"}
    fresh_cluster.kill_host(node)
    run.wait("requeued", timeout=90)
    assert not _released(run), "as long as a node of the job does not answer, Slurm ends the hold"
    fresh_cluster.restart_host(node)
    fresh_cluster.wait_nodes()
    # Only this very command looks; the hold is 121 s, and it began less than 40 s ago.
    fresh_cluster.wait_for(lambda: run.status()[0] == 3 and _released(run), "the hold is ended", 60, every=1)
    run.wait_for_event("first_step", lambda row: row["attempt"] == 1, 120)
    status = run.status()[1]
    assert (status["state"], status["recovered"]) == ("running", 1), status
    alice.command("cancel", run.id, "--now")
    run.wait("cancelled")


def _released(run: Run) -> bool:
    return any(row["event"] == "hold_released" for row in run.lines("events.jsonl"))


@pytest.mark.long
def test_a_range_of_nodes_begins_with_what_is_there(alice: Alice, fresh_cluster: Cluster) -> None:
    job = alice.job_file("range", resources={"nodes": {"min": 2, "max": 3, "spares": 1}, "ranks_per_node": 1})
    plan = alice.command("check", job).stdout
    assert re.search(r"^nodes +2 to 3, as many as are healthy, and 1 spare$", plan, re.MULTILINE), plan
    assert "2 nodes x 1 = 2 ranks, accumulation 2" in plan
    run = Run(alice.cluster, alice.program(SUBMIT, job))
    script = (run.folder / "job.sh").read_text()
    assert "#SBATCH --nodes=2-4\n" in script and "#SBATCH --no-kill\n" in script
    state, losses = alice.program(AWAIT, run.id, timeout=300)
    assert state == "done" and losses and losses == [row["loss"] for row in run.metrics()], run.logs()
    started = next(row for row in run.lines("events.jsonl") if row["event"] == "started")
    assert started["nodes"] == 3, started
