"""From `slurmddp submit` to a finished run, on a real Slurm with real Apptainer, as an ordinary user."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .cluster import Cluster
from .runs import NO_PREFLIGHT, Alice, Run

pytestmark = pytest.mark.cluster

NODES = ("node1", "node2", "node3")


@pytest.fixture(scope="module")
def alice(cluster: Cluster, base_image_root: str) -> Alice:
    """Alice, with an image that `slurmddp build-image` built from a local base."""
    image = "/home/alice/images/built.sif"
    cluster.sh("login", "mkdir -p ~/images")
    cluster.run("login", ["slurmddp", "build-image", image, "--base", base_image_root, "--force"], timeout=600)
    return Alice(cluster, image)


@pytest.fixture(scope="module")
def timed_out(alice: Alice) -> Iterator[Run]:
    """A run that sleeps into its time limit: a minute is Slurm's shortest, so it sleeps while others train."""
    alice.cluster.write("/home/alice/scripts/sleep.py", "import time\nprint('asleep', flush=True)\ntime.sleep(600)\n")
    yield alice.submit(
        "scripts/sleep.py", "--site", "testcluster", "--image", alice.image, "--time", "1m",
        "--set", "resources.cpus_per_node=1", "--set", "resources.mem_per_node=500M",
        "--set", "recovery.requeue=never",
    )  # fmt: skip


@pytest.fixture(scope="module")
def first(alice: Alice, timed_out: Run) -> Run:
    """A two-node run, cancelled by scancel in mid-run once it has a checkpoint of step 20."""
    run = alice.submit(alice.job_file("first", train={"steps": 100000}))
    run.wait_for_step(20)
    # Older ones are pruned by and by.
    while not [path for path in run.folder.glob("checkpoints/step-*/COMPLETE") if path.parent.name >= "step-00000020"]:
        time.sleep(0.1)
    assert len(run.processes()) > 8, "the processes of a running job are seen"
    alice.cluster.run("login", ["scancel", run.job_id])
    return run


def test_the_image_is_what_build_image_says(alice: Alice) -> None:
    lock = json.loads(alice.cluster.machine_path(alice.image + ".lock.json").read_text())
    assert lock["torch"].startswith("2.13.0")
    assert "up to date" in alice.command("build-image", alice.image, "--base", "/opt/images/bookworm-torch").stderr
    other = alice.command("build-image", alice.image, "--base", "/opt/images/bookworm", check=False)
    assert other.returncode == 2 and "built from other inputs (changed: base" in other.stderr


def test_scancel_in_mid_run_leaves_no_process(alice: Alice, first: Run) -> None:
    status = first.wait("cancelled")
    assert first.status()[0] == 1
    alice.cluster.wait_for(lambda: not first.processes(), f"no process is left: {first.processes()}", 20)
    ended = [row for row in first.lines("events.jsonl") if row["event"] == "job_ended"]
    assert [row["signal"] for row in ended] == ["TERM"], status


def test_two_nodes_train_in_the_image_and_the_loss_falls(first: Run) -> None:
    first.wait("cancelled")
    started = next(row for row in first.lines("events.jsonl") if row["event"] == "started")
    assert (started["world"], started["nodes"]) == (4, 2)
    losses = {row["step"]: row["loss"] for row in first.metrics()}
    assert losses[20] < 0.9 * losses[1]
    logs = {path.stem for path in (first.folder / "logs/attempt-000").glob("node*.log")}
    assert len(logs) == 2, logs
    assert (first.folder / "manifest.json").exists() and (first.folder / "code/slurmddp.zip").exists()


def test_a_second_submit_goes_on_with_the_same_samples_on_three_nodes(alice: Alice, first: Run) -> None:
    first.wait("cancelled")
    last = max(int(path.name[5:]) for path in (first.folder / "checkpoints").glob("step-*")) + 40
    second = alice.submit(
        "--resume", first.id, "--nodes", "3", "--set", "resources.ranks_per_node=1", "--set", f"train.steps={last}"
    )
    whole = alice.job_file("whole", resources={"nodes": 1}, train={"steps": last}, recovery=NO_PREFLIGHT)
    second.wait("done")
    reference = alice.submit(whole)
    reference.wait("done")
    resumed = next(row for row in second.lines("events.jsonl") if row["event"] == "resumed")
    assert resumed["step"] >= 20
    assert first.folder.name in resumed["path"]

    samples, ours = reference.samples(), second.samples()
    assert sorted(ours) == list(range(resumed["step"] + 1, last + 1))
    assert all(sorted(ours[step]) == sorted(samples[step]) for step in ours)
    theirs = first.samples()
    assert all(sorted(theirs[step]) == sorted(samples[step]) for step in range(1, resumed["step"] + 1))
    # The dealing is contiguous, so even the order over the ranks is the same on any number of them.
    assert all(ours[step] == samples[step] for step in ours)

    ended = json.loads((second.folder / "markers/attempt-000.json").read_text())
    expected = json.loads((reference.folder / "markers/attempt-000.json").read_text())
    assert ended["validation"]["count"] == expected["validation"]["count"]
    assert ended["validation"]["loss"] == pytest.approx(expected["validation"]["loss"], rel=1e-4)


@pytest.mark.long  # test_first_hour.py
def test_init_submits_as_it_stands(alice: Alice, torch_image: str) -> None:
    alice.cluster.sh("login", "rm -f ~/jobs/init.yaml; mkdir -p ~/jobs")
    alice.command("init", "jobs/init.yaml", "--site", "testcluster")
    run = alice.submit("jobs/init.yaml", "--set", "train.steps=3", "--set", "train.evaluate.batches=1")
    assert run.wait("done")["step"] == 3


def test_a_script_of_the_users_own_gets_every_byte(alice: Alice) -> None:
    """Arguments and variables arrive as they were written, through sbatch, srun, bash and the container."""
    nasty = ["--lr", "3e-4", "a b", "$(touch /home/alice/pwned)", "`id`", "'\"\\", ";", "ä\n*", "", "--", "-x=1,2"]
    alice.cluster.write(
        "/home/alice/scripts/show.py",
        "import json, os, sys\n"
        "if os.environ['RANK'] == '0':\n"
        "    print(json.dumps({'argv': sys.argv[1:], 'env': dict(os.environ), 'cwd': os.getcwd()}))\n",
    )
    variables = {"A": "1,2=3", "B": " $HOME 'x' \"y\" ", "NCCL_IB_HCA": "==mlx5_0,mlx5_1", "C": "back\\slash;#"}
    settings = [word for name, value in variables.items() for word in ("--set", f"environment.{name}={value}")]
    options = ["--site", "testcluster", "--image", alice.image, "--nodes", "2", "--time", "5m"]
    run = alice.submit("scripts/show.py", *options, *settings, "--", *nasty)
    run.wait("done")
    shown = json.loads(next(line for line in run.logs().splitlines() if '"argv"' in line).split(": ", 1)[1])
    assert shown["argv"] == nasty
    assert {name: shown["env"].get(name) for name in variables} == variables
    assert shown["cwd"] == "/home/alice"
    assert shown["env"]["GLOO_SOCKET_IFNAME"] == "ib0"
    assert not {"NCCL_DEBUG", "TORCH_DISTRIBUTED_DEBUG", "TORCH_CPP_LOG_LEVEL"} & shown["env"].keys()
    assert not alice.cluster.machine_path("/home/alice/pwned").exists()
    snapshot = run.folder / "code/project/show.py"
    assert snapshot.read_text() == alice.cluster.machine_path("/home/alice/scripts/show.py").read_text()


@pytest.mark.long
def test_status_names_the_rank_that_failed(alice: Alice) -> None:
    script = "import os, torch.distributed as d\nd.init_process_group('gloo')\nd.barrier()\n"
    script += "if os.environ['RANK'] == '1':\n    raise ValueError('boom')\nd.barrier()\n"
    alice.cluster.write("/home/alice/scripts/crash.py", script)
    run = alice.submit("scripts/crash.py", "--site", "testcluster", "--image", alice.image, "--nodes", "2")
    status = run.wait("failed")
    assert status["cause"].startswith("rank 1 on node") and "ValueError: boom" in status["cause"], status
    assert run.status()[0] == 1


def test_an_error_of_the_program_on_all_nodes_ends_the_run_at_its_first_start(alice: Alice) -> None:
    alice.cluster.write("/home/alice/scripts/missing.py", "print('one start')\nimport nothere\n")
    run = alice.submit("scripts/missing.py", "--site", "testcluster", "--image", alice.image, "--nodes", "2")
    status = run.wait("failed")
    assert "ModuleNotFoundError: No module named 'nothere'" in status["cause"], status
    (started,) = [event for event in run.lines("events.jsonl") if event["event"] == "attempt_started"]
    (ended,) = [event for event in run.lines("events.jsonl") if event["event"] == "attempt_ended"]
    assert ended["decision"] == "failed" and ended["time"] - started["time"] < 60
    noted = list((run.folder / "markers/attempt-000.errors").glob("start-*/*"))
    assert run.logs().count("one start") == len(noted) >= 2


def test_interrupting_a_run_in_an_allocation_saves_first(alice: Alice) -> None:
    job = alice.job_file("interrupted", resources={"nodes": 1}, train={"steps": 100000}, recovery=NO_PREFLIGHT)
    salloc = ["salloc", "--nodes=1", "--cpus-per-task=2", "--mem=3000M", "--time=5"]
    # A shell of scripts starts background jobs with SIGINT ignored; set -m makes it start them as a terminal's does.
    script = f"set -m; slurmddp run {job} & until grep -q 'step *10/' ~/runs/interrupted-*/logs/*/*.log 2>/dev/null"
    script += "; do sleep 0.5; done; kill -INT %1; wait %1; echo exited with $?"
    done = alice.cluster.run("login", [*salloc, "bash", "-c", script], timeout=120)
    assert "was asked to save and exit" in done.stderr
    assert "exited with 1" in done.stdout
    markers = sorted(alice.cluster.machine_path("/home/alice/runs").glob("interrupted-*/markers/attempt-000.json"))
    assert json.loads(markers[-1].read_text())["state"] == "stopped"


def by_hand(alice: Alice, folder: str, *words: str) -> tuple[list[str], list[str]]:
    """The lines of `check --per-node` for node1 and node2: of the preflight, and of the ranks."""
    alice.command("check", *words, "--write", folder)
    planned = alice.command("check", *words, "--per-node", "--head", "node1").stdout
    first = "# First, on each node: "
    every = "; ".join(line[len(first) :] for line in planned.splitlines() if line.startswith(first))
    lines = [
        f"{every}; {line}".replace("RUN_FOLDER", f"/home/alice/{folder}")
        for line in planned.splitlines()
        if line[0] != "#"
    ]
    assert len(lines) == 4
    return lines[:2], lines[2:]


def start_by_hand(alice: Alice, lines: list[str]) -> list[subprocess.Popen[str]]:
    return [alice.cluster.popen(node, ["bash", "-c", line]) for node, line in zip(NODES, lines, strict=False)]


def ends_by_hand(started: list[subprocess.Popen[str]]) -> list[str]:
    """What each node's line says; all end with 0."""
    texts = []
    for process in started:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, out + err
        texts.append(out)
    return texts


def test_the_lines_of_plan_per_node_run_without_slurm(alice: Alice) -> None:
    # One write: with unbuffered output, the parts of two ranks' prints mix.
    say = "os.write(1, b'WORLD %d\\n' % d.get_world_size())"
    script = ("import os, torch.distributed as d", "d.init_process_group('gloo')", say, "d.barrier()", "")
    alice.cluster.write("/home/alice/scripts/world.py", "\n".join(script))
    options = ["--site", "testcluster", "--image", alice.image, "--nodes", "2", "--set", "resources.ranks_per_node=2"]
    _, lines = by_hand(alice, "per-node", "scripts/world.py", *options)
    assert [text.count("WORLD 4") for text in ends_by_hand(start_by_hand(alice, lines))] == [2, 2]


@pytest.mark.long
def test_a_run_by_hand_is_that_of_a_job(alice: Alice) -> None:
    """Preflight, training, the stop file, the same lines again: the losses are those of a job that nobody stopped."""
    steps = 300  # of 40 ms, so that the stop file comes before the last one
    alice.cluster.write("/home/alice/paced/paced.py", (Path(__file__).parent / "paced.py").read_text())
    paced = {"task": "paced:create", "project": "/home/alice/paced", "data": {"pace": 0.04, "delay": 0}, "steps": steps}
    job = alice.job_file("same", train=paced, checkpoint={"every_steps": 20})
    checks, lines = by_hand(alice, "same-by-hand", job)
    ends_by_hand(start_by_hand(alice, checks))
    hand = Run(alice.cluster, {"run_folder": "/home/alice/same-by-hand"})
    verdicts = sorted((hand.folder / "logs/preflight").glob("*"))
    assert verdicts, "the head leaves its verdict"
    started = start_by_hand(alice, lines)
    alice.cluster.wait_for(
        lambda: any(row["step"] >= 30 for row in hand.metrics()) or started[0].poll() is not None, "step 30", 120
    )
    alice.cluster.write("/home/alice/same-by-hand/stop", "")
    ends_by_hand(started)
    stopped = hand.metrics()[-1]["step"]
    assert stopped < steps
    alice.cluster.run("login", ["rm", "/home/alice/same-by-hand/stop"])
    again = [line.replace("SLURMDDP_ATTEMPT=0", "SLURMDDP_ATTEMPT=1") for line in lines]
    ends_by_hand(start_by_hand(alice, again))
    assert [row["step"] for row in hand.lines("events.jsonl") if row["event"] == "resumed"]
    run = alice.submit(job)
    run.wait("done")
    losses = [{row["step"]: row["loss"] for row in each.metrics() if "loss" in row} for each in (hand, run)]
    # A stop and a resume log a step of their own.
    assert {step: losses[0].get(step) for step in losses[1]} == losses[1] and max(losses[0]) == steps


@pytest.mark.long
def test_runs_side_by_side_in_one_allocation(alice: Alice) -> None:
    steps = {"train": {"steps": 10}, "resources": {"nodes": 1, "mem_per_node": "2000M"}}
    jobs = [alice.job_file(name, **steps) for name in ("left", "right")]
    script = " & ".join(f"slurmddp run {job} > {job}.out 2>&1" for job in jobs) + " & wait"
    salloc = ["salloc", "--nodes=2", "--cpus-per-task=2", "--ntasks-per-node=1", "--mem=4000M", "--time=5"]
    alice.cluster.run("login", [*salloc, "bash", "-c", script], timeout=180)
    outputs = [alice.cluster.machine_path(f"{job}.out").read_text() for job in jobs]
    assert all("done" in output for output in outputs), outputs
    heads = [output.split(", head ", 1)[1].split()[0] for output in outputs]
    assert heads[0].rsplit(":")[1] != heads[1].rsplit(":")[1], heads
    listed = json.loads(alice.command("runs", "--json").stdout)
    ours = [item for item in listed if item["run_id"].startswith(("left-", "right-"))]
    assert [item["state"] for item in ours[-2:]] == ["done", "done"]


def test_pending_then_cancelled_before_it_began(alice: Alice) -> None:
    run = alice.submit(alice.job_file("held"), "--set", "resources.sbatch_extra=[--hold]")
    code, status = run.status()
    assert (code, status["state"]) == (3, "pending"), status
    assert "Cancelled job" in alice.command("cancel", run.job_id).stdout
    run.wait("cancelled")
    assert run.status()[0] == 1


@pytest.mark.long  # test_recovery.py plays the same without training
def test_requeued_goes_on_in_a_new_attempt(alice: Alice) -> None:
    run = alice.submit(alice.job_file("again", resources={"nodes": 1}, train={"steps": 100000}))
    run.wait_for_step(10)
    while not any(run.folder.glob("checkpoints/step-*/COMPLETE")):  # older ones are pruned by and by
        time.sleep(0.1)
    alice.cluster.run("login", ["scontrol", "requeue", run.job_id])
    # Slurm holds it back for two minutes: what job.sh left behind ends that, or `status`, which is asked here.
    alice.cluster.wait_for(
        lambda: run.status()[0] == 3 and (run.folder / "logs/attempt-001").exists(), "a second attempt", 60
    )
    run.wait_for_event("hold_released")
    alice.cluster.wait_for(
        lambda: any(row["event"] == "resumed" and row["attempt"] == 1 for row in run.lines("events.jsonl")),
        "the second attempt resumes",
        90,
    )
    assert list((run.folder / "logs/attempt-000").glob("node*.log"))
    step = run.metrics()[-1]["step"]
    said = alice.command("cancel", run.id, "--wait").stdout
    assert "is saving and will exit" in said and "cancelled by you, checkpoint saved, step " in said, said
    marker = json.loads((run.folder / "markers/attempt-001.json").read_text())
    assert marker["reason"] == "cancelled by the user" and marker["step"] >= step
    assert (run.folder / f"checkpoints/step-{marker['step']:08d}/COMPLETE").exists()
    assert run.status()[1]["state"] == "cancelled"


@pytest.mark.long  # test_rehearse.py sends it, too
def test_the_signal_ahead_of_the_time_limit_saves_and_goes_on(alice: Alice) -> None:
    changes = {"resources": {"nodes": 2, "ranks_per_node": 1}, "train": {"steps": 100000}}
    run = alice.submit(alice.job_file("ahead", **changes, checkpoint={"every_steps": 100000}))
    assert "#SBATCH --signal=B:USR2@120" in (run.folder / "job.sh").read_text()
    run.wait_for_step(10)
    # What Slurm sends by itself 120 s before the end, to the batch script alone.
    alice.cluster.run("login", ["scancel", "--batch", "--signal=USR2", run.job_id])
    resumed = run.wait_for_event("resumed", timeout=120)
    marker = json.loads((run.folder / "markers/attempt-000.json").read_text())
    assert (marker["state"], marker["reason"]) == ("stopped", "time limit")
    assert (resumed["attempt"], resumed["step"]) == (1, marker["step"])
    alice.cluster.run("login", ["scancel", run.job_id])
    run.wait("cancelled")


def test_timed_out(timed_out: Run) -> None:
    timed_out.wait("timed out", timeout=200)
    assert timed_out.status()[0] == 1


def test_a_job_that_slurm_has_forgotten(first: Run) -> None:
    """Another id in the record is what a forgotten job looks like: Slurm does not know it."""
    first.wait("cancelled")
    record = first.folder / "submission.json"
    told = json.loads(record.read_text())
    record.write_text(json.dumps({**told, "job_id": "999999"}))
    try:
        code, status = first.status()
        assert (code, status["state"]) == (1, "cancelled"), status
    finally:
        record.write_text(json.dumps(told))


@pytest.mark.long
def test_node_failure(alice: Alice, fresh_cluster: Cluster) -> None:
    run = alice.submit(
        alice.job_file("lost", resources={"nodes": 3}, train={"steps": 100000}),
        "--set", "recovery.requeue=never",
    )  # fmt: skip
    run.wait_for_step(1)
    fresh_cluster.kill_host("node3")
    try:
        run.wait("node failure", timeout=120)
        assert run.status()[0] == 1
    finally:
        fresh_cluster.restart_host("node3")
        fresh_cluster.wait_nodes()


def test_what_sbatch_refuses_leaves_nothing(alice: Alice) -> None:
    before = sorted(path.name for path in alice.cluster.machine_path("/home/alice/runs").iterdir())
    refused = alice.command(
        "submit", alice.job_file("refused"), "--set", "resources.sbatch_extra=[--reservation=none]", check=False
    )
    assert refused.returncode == 2
    assert "eservation" in refused.stderr, refused.stderr
    assert sorted(path.name for path in alice.cluster.machine_path("/home/alice/runs").iterdir()) == before
