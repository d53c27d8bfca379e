"""`ranks_per_node: auto` in the real scripts: what a node starts from what Slurm gave it, what the step asks for."""

import json
import os
import subprocess

import pytest

from tests.helpers import LM_JOB, Desk, make_code, on_disk

AUTO = "resources.ranks_per_node=auto"
BATCH = ("train.batch.global=64", "train.batch.micro=4")
CORES = LM_JOB.replace("gpus", "cores")
DUMP = '#!/bin/bash\nprintf "%s\\n" "$@" >"$DUMP"\n' + 'env >>"$DUMP"\n'


def started(desk: Desk, script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """One of the scripts, run by bash; what it starts leaves its arguments and environment in the file dump."""
    run = desk.root / "run"
    (run / "logs").mkdir(parents=True, exist_ok=True)
    make_code(run)
    path = desk.write("script.sh", on_disk(desk, script))
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "here", "SLURMD_NODENAME": "here"}
    ours = dict.fromkeys(("SLURMDDP_ATTEMPT", "SLURMDDP_PORT", "SLURMDDP_RENDEZVOUS_ID", "SLURMDDP_NODES"), "61000")
    environment = {
        **desk.environment, **slurm, **ours,
        "SLURMDDP_RUN": str(run), "SLURMDDP_LOGS": str(run / "logs"), "DUMP": str(desk.root / "dump"), **variables,
    }  # fmt: skip
    words = ["bash", str(path), *arguments]
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=False, cwd=desk.project)


def dump(desk: Desk) -> list[str]:
    return (desk.root / "dump").read_text().splitlines()


@pytest.mark.parametrize(("gpus", "cores", "threads"), [("1", "16", "16"), ("4", "18", "4"), ("8", "4", "1")])
def test_a_rank_for_each_gpu(desk: Desk, gpus: str, cores: str, threads: str) -> None:
    desk.program("apptainer", DUMP)
    _, node = desk.scripts(LM_JOB, AUTO, *BATCH)
    done = started(desk, node, SLURM_GPUS_ON_NODE=gpus, SLURM_CPUS_ON_NODE=cores)
    assert done.returncode == 0, done.stderr
    assert f"--nproc-per-node={gpus}" in dump(desk)
    assert f"APPTAINERENV_OMP_NUM_THREADS={threads}" in dump(desk)


def test_a_node_without_a_gpu_says_so(desk: Desk) -> None:
    desk.program("apptainer", DUMP)
    _, node = desk.scripts(LM_JOB, AUTO, *BATCH)
    done = started(desk, node)
    assert done.returncode == 1
    assert "node here: Slurm gave this node no GPU" in done.stderr


@pytest.mark.parametrize(
    ("cores", "own", "ranks", "threads"),
    [("4", None, "1", "4"), ("17", None, "2", "8"), ("64", None, "8", "8"), ("4", "2", "2", "2"), ("1", "2", "1", "2")],
)
def test_ranks_share_the_cores(desk: Desk, cores: str, own: str | None, ranks: str, threads: str) -> None:
    desk.program("fake-python", DUMP)
    options = [AUTO, *BATCH, "container.python=fake-python", *([f"environment.OMP_NUM_THREADS={own}"] if own else [])]
    _, node = desk.scripts(CORES, *options)
    done = started(desk, node, SLURM_CPUS_ON_NODE=cores)
    assert done.returncode == 0, done.stderr
    assert f"--nproc-per-node={ranks}" in dump(desk)
    assert f"OMP_NUM_THREADS={threads}" in dump(desk)


@pytest.mark.parametrize(
    ("found", "gpus"),
    [
        ("gpu:3", "3"),
        ("gpu:a100:4,gpu:h100:2", "6"),
        ("craynetwork:4,gpu:2", "2"),
        ("shard:8,gpu:a100:1(S:0-1)", "1"),
    ],
)
def test_the_step_asks_for_all_gpus_of_the_job(desk: Desk, found: str, gpus: str) -> None:
    desk.program("srun", DUMP)
    desk.program(
        "scontrol", f"#!/bin/bash\ncase $2 in hostnames) echo here;; *) echo 'JobId=7 JOB_GRES={found} X=y';; esac\n"
    )
    job, _ = desk.scripts(LM_JOB, AUTO, *BATCH, "recovery.preflight=false")
    done = started(desk, job, str(desk.root / "run"), SLURM_GPUS_PER_NODE="1", SLURM_GPUS="9")
    assert done.returncode == 0, done.stderr + done.stdout
    assert f"--gpus={gpus}" in dump(desk)
    assert not [text for text in dump(desk) if text.startswith(("SLURM_GPUS=", "SLURM_GPUS_PER_NODE="))]


@pytest.mark.parametrize("found", ["JOB_GRES=(null)", ""])
def test_a_job_without_gpus_ends_at_once(desk: Desk, found: str) -> None:
    desk.program("srun", DUMP)
    desk.program("scontrol", f"#!/bin/bash\ncase $2 in hostnames) echo here;; *) echo 'JobId=7 {found}';; esac\n")
    job, _ = desk.scripts(LM_JOB, AUTO, *BATCH)
    done = started(desk, job, str(desk.root / "run"))
    assert done.returncode == 1
    assert "gave this job no GPUs" in done.stdout
    ended = json.loads((desk.root / "run" / "events.jsonl").read_text().splitlines()[-1])
    assert (ended["event"], ended["decision"]) == ("job_ended", "failed")
    assert not os.path.exists(desk.root / "dump")


def test_a_step_of_an_allocation_takes_all_of_it(desk: Desk) -> None:
    desk.program("srun", DUMP)
    desk.program("scontrol", "#!/bin/bash\ncase $2 in hostnames) echo here;; *) echo 'JOB_GRES=gpu:3';; esac\n")
    job, _ = desk.scripts(LM_JOB, AUTO, *BATCH, "resources.mem_per_node=3G", inside=True)
    assert started(desk, job, str(desk.root / "run")).returncode == 0
    assert {"--gpus=3", "--mem=3072M"} <= set(dump(desk))
    assert not [text for text in dump(desk) if text.startswith(("--exact", "--gpus-per-node"))]


@pytest.mark.parametrize(("option", "processes"), [(AUTO, "1"), ("resources.ranks_per_node=2", "2")])
def test_the_network_is_measured_with_a_process_per_gpu_where_nodes_are_alike(
    desk: Desk, option: str, processes: str
) -> None:
    desk.program("apptainer", DUMP)
    wanted = ("network.min_bandwidth=150", "network.allow_socket=true")
    _, node = desk.scripts(LM_JOB, option, *BATCH, *wanted)
    network = {"SLURMDDP_STEP": "network", "SLURMDDP_NETWORK_NODES": "here there"}
    done = started(desk, node, SLURM_GPUS_ON_NODE="8", SLURM_CPUS_ON_NODE="16", **network)
    assert done.returncode == 0, done.stderr
    words = dump(desk)
    begin = words.index("slurmddp.runtime.network")
    given = dict(zip(words[begin + 1 :: 2], words[begin + 2 :: 2], strict=False))
    assert (given["--ranks"], given["--nodes"], given["--min-bandwidth"]) == (processes, "here there", "150.0")
    assert "--allow-socket" in words and "APPTAINERENV_GLOO_SOCKET_IFNAME=lo" not in words
