"""Which libcuda the ranks get, chosen by each node in a real container: two nodes whose drivers differ.

The nodes have no GPUs: files stand in for the kernel's report of the driver, and a folder of alice's for the image's
compat libraries. What is real is the way: Apptainer, --nv, the image's shell, torchrun, the ranks.
"""

from __future__ import annotations

import pytest

from .cluster import Cluster
from .runs import Alice

pytestmark = pytest.mark.cluster

HOME = "/home/alice/driver"
REPORT = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder@U22)  Fri Apr 25\n"
SITE = f"""\
name: driven
title: the test cluster with two drivers
gpu_vendor: nvidia
gpu_request: gpus-per-node
partitions:
  main: {{cpus_per_node: 4, mem_per_node: 6000M, max_time: 2h, gpus_per_node: 1}}
job:
  resources: {{partition: main}}
  network: {{interface: ib0}}
  paths: {{runs: $HOME/runs, cache: $HOME/.cache/slurmddp}}
  recovery: {{preflight: false}} # which would miss the GPUs
  setup: ["export SLURMDDP_NVIDIA={HOME}/$SLURMD_NODENAME"]
  environment: {{_CUDA_COMPAT_PATH: {HOME}/compat, CUDA_VERSION: 13.0.1.012, CUDA_DRIVER_VERSION: 580.82.07}}
"""
SCRIPT = """\
import os
print("LIBRARIES", os.environ["SLURMDDP_NODE"], os.environ.get("LD_LIBRARY_PATH", ""), flush=True)
"""


def test_each_node_chooses_by_its_own_driver(cluster: Cluster, torch_image: str) -> None:
    alice = Alice(cluster, torch_image)
    cluster.write("/home/alice/.config/slurmddp/sites/driven.yaml", SITE)
    cluster.write(f"{HOME}/script.py", SCRIPT)
    for node, driver in (("node1", "535.183.01"), ("node2", "580.95.05")):
        cluster.write(f"{HOME}/{node}/version", REPORT.format(driver))
        cluster.write(f"{HOME}/{node}/gpus/0000:07:00.0/information", "Model: \t NVIDIA A100-SXM4-40GB\n")
    real = f"{HOME}/compat/lib.real"
    cluster.write(f"{real}/libcuda.so.580.82.07", "")
    cluster.sh("login", f"ln -sf libcuda.so.580.82.07 {real}/libcuda.so.1")

    run = alice.submit(
        "driver/script.py", "--site", "driven", "--image", alice.image, "--nodes", "2", "--time", "5m",
        "--set", "resources.ranks_per_node=1", "--set", "resources.sbatch_extra=[--exclude=node3]",
    )  # fmt: skip
    run.wait("done")
    lines = run.logs().splitlines()
    libraries = dict(line.split("LIBRARIES ")[1].split(" ", 1) for line in lines if "LIBRARIES " in line)
    assert libraries["node1"].split(":")[0] == real and ":" in libraries["node1"]
    assert real not in libraries["node2"] and libraries["node2"]
    said = {line.split("node ")[1].split(":")[0]: line for line in lines if "NVIDIA driver" in line}
    assert "driver 535.183.01, NVIDIA A100-SXM4-40GB" in said["node1"]
    assert f"which data-center GPUs have; compat libraries on ({real})" in said["node1"]
    assert f"native; compat libraries off ({real})" in said["node2"]
