"""A newcomer's first hour on a real Slurm: three commands from an empty HOME to a job on two nodes; a plain script."""

from __future__ import annotations

import json

import pytest

from .cluster import Cluster
from .roots import IMAGE_PYTHON
from .runs import Alice, Run, submitted
from .variant import variant

pytestmark = pytest.mark.cluster

VENV = "/home/alice/venv"
SCRIPT = """\
import argparse
import importlib.util
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main():
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume")
    resume = parser.parse_args().resume
    first = 0
    if resume:
        state = torch.load(resume)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"] + 1
    for step in range(first, 20):
        loss = model(torch.randn(8, 4)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            os.makedirs("out", exist_ok=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, "out/part.pt")
            os.replace("out/part.pt", "out/last.pt")
    ours = "with" if importlib.util.find_spec("slurmddp") else "without"
    rank, world = dist.get_rank(), dist.get_world_size()
    print(f"trained: rank {rank} of {world} on {os.uname().nodename}, {ours} slurmddp", flush=True)
    print(f"began at step {first}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""
#: The GPUs that this Slurm counts are null devices.
SMALL = ("--nodes", "2", "--gpus-per-node", "0", "--cpus-per-node", "1", "--mem", "1500M")


@pytest.fixture(scope="module")
def alice(cluster: Cluster, torch_image: str) -> Alice:
    return Alice(cluster, torch_image)


@pytest.fixture(scope="module")
def venv(cluster: Cluster) -> str:
    """A virtual environment with torch in alice's home: the image's Python and packages, without the image."""
    root = cluster.torch_image_root
    cluster.sh("login", f"[ -e {VENV} ] || {root}/usr/bin/python3 -m venv --without-pip {VENV}")
    packages = f"{root}/usr/local/lib/python{IMAGE_PYTHON}/dist-packages\n"
    cluster.write(f"{VENV}/lib/python{IMAGE_PYTHON}/site-packages/torch.pth", packages)
    torchrun = f"#!{VENV}/bin/python\nfrom torch.distributed.run import main\nmain()\n"
    cluster.write(f"{VENV}/bin/torchrun", torchrun, mode=0o755)
    return VENV


def project(alice: Alice, name: str, *, image: bool) -> str:
    """A new home with a script in it and, if asked for, an image beside it."""
    home = f"/home/alice/{name}"
    alice.cluster.sh("login", f"rm -rf {home} && mkdir {home}")
    alice.cluster.write(f"{home}/train.py", SCRIPT)
    if image:
        alice.cluster.sh("login", f"ln -s {alice.image} {home}/torch.sif")
    return home


@pytest.mark.parametrize("software", ["venv", "image"])
@pytest.mark.skipif(not variant().apptainer, reason="these hosts lack Apptainer")
def test_three_commands_from_an_empty_home(alice: Alice, venv: str, software: str) -> None:
    home = project(alice, f"first-{software}", image=software == "image")
    environment = {"HOME": home, **({"VIRTUAL_ENV": venv} if software == "venv" else {})}

    def slurmddp(*words: str) -> str:
        return alice.cluster.run("login", ["slurmddp", *words], cwd=home, env=environment, timeout=120).stdout

    made = json.loads(slurmddp("init", "--yes", "--json"))
    assert made["script"] == "train.py" and "drafted" in made["why"], made
    assert (made["image"] == "torch.sif") == (software == "image") and (made["environment"] == venv) == (
        software == "venv"
    )
    assert made["next"] == ["slurmddp check job.yaml", "slurmddp submit job.yaml"]
    sizes = alice.cluster.run("login", ["sinfo", "--noheader", "--format=%G"]).stdout
    assert made["gpus_per_node"] and f"gpu:{made['gpus_per_node']}" in sizes.replace("gpu:a100:", "gpu:"), (made, sizes)
    checked = slurmddp("check", "job.yaml", *SMALL)
    place = {"venv": f"virtual environment {venv}, no container", "image": f"{home}/torch.sif"}[software]
    assert checked.startswith("train on ") and place in checked, checked
    answer = json.loads(slurmddp("submit", "job.yaml", *SMALL, "--json"))
    # Her other HOME does not list it: its folder names it there.
    run = Run(alice.cluster, {**answer, "run_id": answer["run_folder"]})
    submitted.append(run)
    run.wait("done", timeout=240)
    logs = run.logs()
    assert all(f"trained: rank {rank} of 2" in logs for rank in (0, 1)), logs
    again = json.loads(slurmddp("resume", answer["run_folder"], "--yes", "--json"))
    run = Run(alice.cluster, {**again, "run_id": again["run_folder"]})
    submitted.append(run)
    run.wait("done", timeout=240)
    assert "began at step 20" in run.logs() and "began at step 0" in logs, run.logs()
    bundle = json.loads(slurmddp("debug", "bundle", answer["run_folder"], "--json"))
    assert {"slurm/accounting.txt", "doctor.txt", "events.jsonl"} <= {each["name"] for each in bundle["files"]}, bundle


@pytest.mark.skipif(not variant().apptainer, reason="these hosts lack Apptainer")
def test_a_plain_script_trains_on_two_nodes_without_slurmddp(alice: Alice, venv: str) -> None:
    home = project(alice, "plain", image=True)
    options = {"venv": ("--venv", venv), "image": ("--image", f"{home}/torch.sif")}
    for name, software in options.items():
        words = ["slurmddp", "submit", "--plain", "train.py", "--name", name, "--site", "testcluster", "--json"]
        answer = json.loads(alice.cluster.run("login", [*words, *SMALL, *software], cwd=home).stdout)
        assert len(answer["script"].splitlines()) <= 40 and answer["missing"]
        job = alice.cluster.wait_job(answer["job_id"], timeout=240)
        log = alice.cluster.machine_path(answer["log"]).read_text()
        assert job == "COMPLETED", log
        found = sorted(line for line in log.splitlines() if line.startswith("trained: "))
        nodes = [line.rpartition(" on ")[2].partition(",")[0] for line in found]
        assert [line.partition(" on ")[0] for line in found] == ["trained: rank 0 of 2", "trained: rank 1 of 2"], log
        assert len(set(nodes)) == 2 and all(line.endswith("without slurmddp") for line in found), log
