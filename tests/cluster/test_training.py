"""The training entrypoint on a real Slurm: its checkpoints afterwards, hangs, stragglers, stopping, and its time."""

from __future__ import annotations

import json
import shutil
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import flip

from .cluster import Cluster
from .runs import Alice, Run

pytestmark = pytest.mark.cluster

ONE_RANK_A_NODE = {"ranks_per_node": 1, "cpus_per_node": 1, "mem_per_node": "1500M"}
SLOW = {
    "task": "paced:create",
    "project": "/home/alice/paced",
    "data": {"pace": 0.04, "delay": 0.05},
    "batch": {"global": 3, "micro": 1},
    "optimizer": {"name": "sgd"},
    "steps": 100000,
    "log_every": 1,
    "trace_samples": False,
}


@pytest.fixture(scope="module")
def alice(cluster: Cluster, torch_image: str) -> Alice:
    """Alice, with some real text and a task of her own."""
    text = cluster.machine_path("/home/alice/text")
    text.mkdir(exist_ok=True)
    for source in sorted(Path(sysconfig.get_path("stdlib")).glob("a*.py")):
        shutil.copyfile(source, text / source.name)
    cluster.write("/home/alice/paced/paced.py", (Path(__file__).parent / "paced.py").read_text())
    return Alice(cluster, torch_image)


def wait_for_event(
    run: Run, event: str, fits: Callable[[dict[str, Any]], bool] = lambda row: True, timeout: float = 60
) -> dict[str, Any]:
    """The first event of that name that fits; the failure shows all events and logs."""
    deadline = time.monotonic() + timeout
    while True:
        found = [row for row in run.lines("events.jsonl") if row["event"] == event and fits(row)]
        if found:
            return found[0]
        seen = "\n".join(map(str, run.lines("events.jsonl")))
        assert time.monotonic() < deadline, f"no {event}:\n{seen}\n{run.logs()}"
        time.sleep(0.1)


def steps(answer: list[dict[str, Any]]) -> list[int]:
    return [item["step"] for item in answer]


class TestCheckpoints:
    """One run with four of them, and another one that goes on from what is left."""

    @pytest.fixture(scope="class")
    def trained(self, alice: Alice) -> Run:
        run = alice.submit(alice.job_file("saved", resources=ONE_RANK_A_NODE, checkpoint={"keep": 9}))
        run.wait("done")
        return run

    @pytest.fixture(scope="class")
    def resumed(self, alice: Alice, trained: Run) -> Run:
        """Goes on from the run whose newest checkpoint has lost a bit since."""
        newest = max((trained.folder / "checkpoints").glob("step-*"))
        flip(max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size))
        done = alice.command("checkpoint", "verify", trained.id, check=False)
        assert done.returncode == 1, done.stdout + done.stderr
        bad = [line for line in done.stdout.splitlines() if "NOT USABLE" in line]
        assert len(bad) == 1 and bad[0].startswith("step 40 ") and "sha256" in bad[0], done.stdout
        run = alice.submit("--resume", trained.id, "--set", "train.steps=50")
        run.wait("done")
        return run

    def test_list_verify_and_prune(self, alice: Alice, trained: Run) -> None:
        listed = json.loads(alice.command("checkpoint", "list", trained.id, "--json").stdout)
        assert steps(listed) == [40, 30, 20, 10]
        assert all(item["complete"] and item["own"] and item["world"] == 2 for item in listed)
        assert [item["resumed_from"] for item in listed] == [True, False, False, False]
        verified = alice.command("checkpoint", "verify", trained.id).stdout.splitlines()
        assert len(verified) == 4 and all("  good, " in line for line in verified), verified

        alice.command("checkpoint", "prune", trained.id, "--keep", "3")
        assert steps(json.loads(alice.command("checkpoint", "list", trained.id, "--json").stdout)) == [40, 30, 20]

    def test_the_export_is_made_in_the_image_and_loads_there(self, alice: Alice, trained: Run) -> None:
        done = alice.command("checkpoint", "export", trained.id, "--output", "/home/alice/saved.pt", "--force")
        assert f"exporting step 40 of run {trained.id} in {alice.image}" in done.stderr
        script = "import torch; state = torch.load('saved.pt', weights_only=True);"
        script += "print(sum(tensor.numel() for tensor in state.values()), all(v.isfinite().all() for v in state.values()))"
        loaded = alice.cluster.run("login", ["apptainer", "exec", alice.image, "python3", "-W", "ignore", "-c", script])
        started = next(row for row in trained.lines("events.jsonl") if row["event"] == "started")
        assert loaded.stdout.split() == [str(started["parameters"]), "True"]

    def test_resuming_refuses_the_flipped_bit_and_takes_the_one_before(self, trained: Run, resumed: Run) -> None:
        event = next(row for row in resumed.lines("events.jsonl") if row["event"] == "resumed")
        assert event["step"] == 30 and trained.id in event["path"]
        logs = resumed.logs()
        assert "checkpoint refused: " in logs and "step-00000040" in logs and "looking for the one before" in logs
        assert min(resumed.samples()) == 31

    def test_its_time_adds_up(self, alice: Alice, resumed: Run) -> None:
        found = json.loads(alice.command("goodput", resumed.id, "--json").stdout)
        assert round(sum(found["seconds"].values()), 3) == found["wall_seconds"]
        assert found["wall_seconds"] == round(found["end"] - found["begin"], 3)
        assert all(found["seconds"][kind] > 0 for kind in ("queue", "image", "init", "training")), found
        assert found["seconds"]["lost"] == found["seconds"]["restart"] == found["seconds"]["run"] == 0, found
        ended = wait_for_event(resumed, "job_ended")
        assert found["end"] == pytest.approx(ended["time"], abs=0.002)
        assert (found["attempts"], found["launches"], found["failures"]) == (1, 1, 0)


def rank_process(run: Run, rank: int) -> tuple[str, int]:
    """Node and process id of a rank."""
    script = (
        f"for p in $(grep -lzsx SLURM_JOB_ID={run.job_id} /proc/[0-9]*/environ); do"
        f" grep -qzsx RANK={rank} $p && basename ${{p%/environ}}; done; true"
    )
    for node in run.cluster.nodes:
        found = run.cluster.sh(node, script, user="root").stdout.split()
        if found:
            return node, int(found[0])
    raise AssertionError(f"no process of rank {rank}\n{run.logs()}")


def test_a_stopped_rank_is_named_and_the_ranks_start_again(alice: Alice) -> None:
    """Its first hang ends when the rank goes on, as one on a node that was only frozen; the second ends the job."""
    run = alice.submit(
        alice.job_file(
            "hung",
            resources={"mem_per_node": "2500M"},
            train={"steps": 100000, "trace_samples": False},
            timeouts={"hang": 3, "collective": 20},
            launch={"max_restarts": 1},
        )
    )
    run.wait_for_step(20)
    node, process = rank_process(run, 3)
    alice.cluster.run(node, ["kill", "-STOP", str(process)])
    stopped = time.time()
    event = wait_for_event(run, "hang")
    alice.cluster.run(node, ["kill", "-CONT", str(process)])
    assert (event["kind"], event["ranks"], event["nodes"]) == ("silent", [3], [node])
    print("hang after", event["time"] - stopped)

    resumed = wait_for_event(run, "resumed")
    print("resumed after", resumed["time"] - event["time"])
    assert resumed["step"] >= 20
    again = wait_for_event(run, "checkpoint_saved", lambda row: row["time"] > resumed["time"])
    assert again["step"] > resumed["step"]

    node, process = rank_process(run, 1)
    alice.cluster.run(node, ["kill", "-STOP", str(process)])
    event = wait_for_event(run, "hang", lambda row: row["time"] > resumed["time"])
    assert (event["kind"], event["ranks"], event["nodes"]) == ("silent", [1], [node])
    status = run.wait("failed")
    print("ended after", time.time() - event["time"], status)
    assert "hang" in status["cause"] and f"rank 1 on {node}" in status["cause"], status
    found = json.loads(alice.command("goodput", run.id, "--json").stdout)
    print(found)
    assert round(sum(found["seconds"].values()), 3) == found["wall_seconds"]
    assert found["launches"] == found["failures"] == 2
    assert found["seconds"]["lost"] > 0 and found["seconds"]["restart"] > 0


class TestStragglers:
    """One run on three nodes: a slow dataset, then a slow link, then the stop file."""

    @pytest.fixture(scope="class")
    def run(self, alice: Alice) -> Run:
        run = alice.submit(alice.job_file("slow", resources={"nodes": 3, **ONE_RANK_A_NODE}, train=SLOW))
        run.wait_for_step(110)  # It takes a few seconds to know what is usual.
        return run

    def test_a_slow_dataset(self, alice: Alice, run: Run) -> None:
        t=time.time()
        alice.cluster.write(f"{run.answer['run_folder']}/slow", "node2")
        begins = wait_for_event(run, "straggler_begins")
        print("data", time.time() - t, begins)
        assert (begins["host"], begins["part"]) == ("node2", "data")
        t=time.time()
        (run.folder / "slow").unlink()
        wait_for_event(run, "straggler_ends", lambda row: row["host"] == "node2")
        print("data end", time.time() - t)

    def test_a_slow_link(self, alice: Alice, run: Run) -> None:
        seen = len(run.metrics())
        t=time.time()
        alice.cluster.slow_link("node3", None, rate="400mbit")
        try:
            begins = wait_for_event(run, "straggler_begins", lambda row: row["part"] == "network")
            print("net", time.time() - t, begins)
            probed = wait_for_event(run, "links_probed", lambda row: row["host"] is not None)
            print(probed)
            for row in run.metrics()[seen-20:seen+40]:
                print(row["step"], row["seconds"])
        finally:
            alice.cluster.slow_link("node3", None)
        assert begins["host"] == probed["host"] == "node3"
        t=time.time()
        wait_for_event(run, "straggler_ends", lambda row: row["part"] == "network")
        print("net end", time.time() - t)

    def test_the_stop_file_ends_it_within_steps(self, alice: Alice, run: Run) -> None:
        path = f"{run.answer['run_folder']}/stop"
        alice.cluster.write(path, "enough\n")
        written = alice.cluster.machine_path(path).stat().st_mtime
        run.wait("stopped")
        marker = json.loads((run.folder / "markers/attempt-000.json").read_text())
        assert (marker["state"], marker["reason"]) == ("stopped", "enough")
        rows = run.metrics()
        assert marker["step"] == rows[-1]["step"]
        # It is looked for once a second: the step during which that is, and the one after.
        later = [row["step"] for row in rows if row["time"] > written + 1]
        print(len(later), rows[-1]["time"] - written)
        assert len(later) <= 2, (written, later)
        assert (run.folder / f"checkpoints/step-{marker['step']:08d}/COMPLETE").exists()
