"""The training entrypoint on a real Slurm: its checkpoints afterwards, hangs, stragglers, stopping, and its time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import flip

from .cluster import Cluster
from .runs import NO_PREFLIGHT, ONE_RANK_A_NODE, Alice, Run

pytestmark = pytest.mark.cluster

#: Steps of 50 ms, most of it asleep: what other work the machine has matters little.
PACED = {
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
    """Alice, with a task of her own."""
    cluster.write("/home/alice/paced/paced.py", (Path(__file__).parent / "paced.py").read_text())
    return Alice(cluster, torch_image)


@pytest.fixture(scope="module")
def trained(alice: Alice) -> Run:
    """A run with checkpoints of the steps 10, 20, 30, 40."""
    run = alice.submit(
        alice.job_file("saved", resources=ONE_RANK_A_NODE, checkpoint={"keep": 9}, recovery=NO_PREFLIGHT)
    )
    run.wait("done")
    return run


@pytest.fixture(scope="module")
def resumed(alice: Alice, trained: Run) -> Run:
    """Goes on from the run whose newest checkpoint has lost a bit since."""
    shards = (trained.folder / "checkpoints/step-00000040").glob("*.distcp")
    flip(max(shards, key=lambda path: path.stat().st_size))
    run = alice.submit("--resume", trained.id, "--set", "train.steps=50")
    run.wait("done")
    return run


@pytest.fixture(scope="module")
def paced(alice: Alice) -> Run:
    """A run on three nodes that knows what is usual."""
    resources = {"nodes": 3, **ONE_RANK_A_NODE}
    run = alice.submit(
        alice.job_file(
            "paced", resources=resources, train=PACED, checkpoint={"every_steps": 100000}, recovery=NO_PREFLIGHT
        )
    )
    run.wait_for_step(110)  # Ten first steps, then windows of 10, 10 and, a few times, of about a second.
    return run


def steps(listed: str) -> list[int]:
    """Of the JSON of `slurmddp checkpoint list`."""
    return [item["step"] for item in json.loads(listed)]


def time_of(alice: Alice, run: Run) -> dict[str, Any]:
    """What `slurmddp status --time` says, which has to add up."""
    found: dict[str, Any] = json.loads(alice.command("status", run.id, "--time", "--json", check=False).stdout)
    assert round(sum(found["seconds"].values()), 3) == found["wall_seconds"] == round(found["end"] - found["begin"], 3)
    assert found["end"] == pytest.approx(run.wait_for_event("job_ended")["time"], abs=0.002)
    assert all(found["seconds"][kind] > 0 for kind in ("queue", "image", "init", "training")), found
    return found


class TestCheckpoints:
    """In this order: each does more harm to them than the one before."""

    def test_the_export_loads_in_the_image(self, alice: Alice, trained: Run) -> None:
        done = alice.command("checkpoint", "export", trained.id, "--output", "/home/alice/saved.pt", "--force")
        assert f"exporting step 40 of run {trained.id}\n" in done.stderr
        script = "import torch; values = torch.load('saved.pt', weights_only=True).values();"
        script += "print(sum(value.numel() for value in values), all(value.isfinite().all() for value in values))"
        loaded = alice.cluster.run("login", ["apptainer", "exec", alice.image, "python3", "-W", "ignore", "-c", script])
        started = trained.wait_for_event("started")
        assert loaded.stdout.split() == [str(started["parameters"]), "True"]

    def test_list_verify_and_prune(self, alice: Alice, trained: Run) -> None:
        listed = json.loads(alice.command("checkpoint", "list", trained.id, "--json").stdout)
        assert [(item["step"], item["resumed_from"]) for item in listed] == [
            (40, True), (30, False), (20, False), (10, False)
        ]  # fmt: skip
        assert all(item["complete"] and item["own"] and item["world"] == 2 for item in listed)
        verified = alice.command("checkpoint", "verify", trained.id).stdout.splitlines()
        assert len(verified) == 4 and all("  good, " in line for line in verified), verified

        alice.command("checkpoint", "prune", trained.id, "--keep", "3")
        assert steps(alice.command("checkpoint", "list", trained.id, "--json").stdout) == [40, 30, 20]

    def test_resuming_refuses_a_flipped_bit_and_takes_the_one_before(
        self, alice: Alice, trained: Run, resumed: Run
    ) -> None:
        event = resumed.wait_for_event("resumed")
        assert event["step"] == 30 and trained.id in event["path"]
        logs = resumed.logs()
        assert "checkpoint rejected: " in logs and "step-00000040" in logs and "trying the one before" in logs
        assert sorted(resumed.samples()) == list(range(31, 51))

        done = alice.command("checkpoint", "verify", trained.id, check=False)
        assert done.returncode == 1, done.stdout + done.stderr
        bad = [line for line in done.stdout.splitlines() if "NOT USABLE" in line]
        assert len(bad) == 1 and bad[0].startswith("step 40 ") and "sha256 differs" in bad[0], done.stdout

    def test_its_time_adds_up(self, alice: Alice, resumed: Run) -> None:
        found = time_of(alice, resumed)
        assert (found["attempts"], found["rank_starts"], found["failures"]) == (1, 1, 0)
        assert found["seconds"]["lost"] == found["seconds"]["restart"] == found["seconds"]["run"] == 0, found


def test_a_frozen_rank_is_named_and_the_ranks_start_again(alice: Alice) -> None:
    """It goes on after the verdict, as on a node that was frozen for a while. (One that does not: test_faults.py.)"""
    run = alice.submit(
        alice.job_file(
            "hung",
            resources=ONE_RANK_A_NODE,
            train={"steps": 100000, "trace_samples": False},
            timeouts={"hang": "3s", "collective": "20s"},
            recovery=NO_PREFLIGHT,
        )
    )
    run.wait_for_step(20)
    ((node, process, _),) = run.processes("RANK=1")
    alice.cluster.run(node, ["kill", "-STOP", str(process)])
    hang = run.wait_for_event("hang")
    alice.cluster.run(node, ["kill", "-CONT", str(process)])
    assert (hang["kind"], hang["ranks"], hang["nodes"]) == ("silent", [1], [node])

    resumed = run.wait_for_event("resumed")
    assert resumed["attempt"] == 0 and resumed["step"] >= 10
    saved = run.wait_for_event("checkpoint_saved", lambda row: row["time"] > resumed["time"])
    assert saved["step"] > resumed["step"]
    alice.command("cancel", run.id, "--wait")
    assert run.status()[1]["state"] == "cancelled"
    alice.cluster.wait_for(lambda: not run.processes(), f"no process is left: {run.processes()}", 20)

    found = time_of(alice, run)
    assert (found["attempts"], found["rank_starts"]) == (1, 2)
    assert found["seconds"]["restart"] > 0 and found["seconds"]["lost"] > 0, found


class TestStragglers:
    """One run: a profile, a slow dataset, then slow links, then the stop file."""

    def test_steps_are_profiled_while_it_runs(self, alice: Alice, paced: Run) -> None:
        paced.wait_for_step(1)
        found = json.loads(alice.command("debug", "profile", paced.id, "--steps", "3", "--all-ranks", "--json").stdout)
        assert (found["last"] - found["step"], found["error"], len(found["files"])) == (2, "", 3), found
        assert all(alice.cluster.machine_path(path).stat().st_size > 1000 for path in found["files"])
        paced.wait_for_step(found["last"] + 1)

    def test_a_slow_dataset(self, alice: Alice, paced: Run) -> None:
        alice.cluster.write(f"{paced.answer['run_folder']}/slow", "node2")
        begins = paced.wait_for_event("straggler_begins", lambda row: row["part"] == "data")
        assert (begins["host"], begins["slow_rank"]) == ("node2", 1)
        (paced.folder / "slow").unlink()
        ends = paced.wait_for_event("straggler_ends", lambda row: row["part"] == "data")
        assert ends["host"] == "node2"
        assert "straggler: node2 is slow in data: " in paced.logs()

    @pytest.mark.long
    def test_slow_links(self, alice: Alice, paced: Run) -> None:
        alice.cluster.slow_link("node3", None, rate="200mbit")
        try:
            begins = paced.wait_for_event("straggler_begins", lambda row: row["part"] == "network")
            probed = paced.wait_for_event("links_probed", lambda row: row["host"] is not None)
        finally:
            alice.cluster.slow_link("node3", None)
        assert begins["host"] == probed["host"] == "node3"
        ends = paced.wait_for_event("straggler_ends", lambda row: row["part"] == "network")
        assert ends["host"] == "node3"

    def test_the_stop_file_ends_it_within_steps(self, alice: Alice, paced: Run) -> None:
        path = f"{paced.answer['run_folder']}/stop"
        alice.cluster.write(path, "enough\n")
        written = alice.cluster.machine_path(path).stat().st_mtime
        paced.wait("stopped")
        marker = json.loads((paced.folder / "markers/attempt-000.json").read_text())
        assert (marker["state"], marker["reason"]) == ("stopped", "enough")
        rows = paced.metrics()
        assert marker["step"] == rows[-1]["step"]
        # It is looked for once a second: the step during which a second is over, and the one that begins after it.
        late = [row["step"] for row in rows if row["time"] > written + 1]
        assert len(late) <= 2, (written, late)
        assert (paced.folder / f"checkpoints/step-{marker['step']:08d}/COMPLETE").exists()
