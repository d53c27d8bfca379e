"""A cluster for `sites init`: small commands that print what Slurm's do."""

from collections.abc import Callable

import pytest

from tests.helpers import Desk

CONFIG = """\
Configuration data as of 2026-11-23T14:12:36
ClusterName             = Alps 2
JobSubmitPlugins        = lua
MaxMemPerNode           = UNLIMITED
SelectType              = select/cons_res
SLURM_VERSION           = 22.05.8
"""
PARTITIONS = """\
PartitionName=gpu AllowGroups=ALL AllowAccounts=physics,bio AllowQos=ALL Default=YES QoS=short DefaultTime=NONE \
MaxNodes=8 MaxTime=2-00:00:00 MaxCPUsPerNode=UNLIMITED State=UP MaxMemPerNode=UNLIMITED
PartitionName=cores.long AllowAccounts=ALL Default=NO QoS=N/A MaxNodes=UNLIMITED MaxTime=UNLIMITED MaxCPUsPerNode=32 \
State=UP MaxMemPerCPU=1000
PartitionName=preempt AllowAccounts=ALL Default=NO QoS=N/A MaxNodes=UNLIMITED MaxTime=90:00 State=DRAIN
PartitionName=odd AllowAccounts=ALL Default=NO QoS=N/A MaxNodes=UNLIMITED MaxTime=INFINITE State=UP
"""
NODES = """\
NodeName=g1 Arch=x86_64 CPUEfctv=120 CPUTot=128 Gres=gpu:a100:4(S:0) RealMemory=515000 MemSpecLimit=3000 State=IDLE \
ThreadsPerCore=2 AvailableFeatures=ib Partitions=gpu
NodeName=g2 Arch=x86_64 CPUEfctv=120 CPUTot=128 Gres=gpu:a100:4(S:1) RealMemory=515000 MemSpecLimit=3000 State=MIXED \
ThreadsPerCore=2 AvailableFeatures=ib Partitions=gpu
NodeName=c1 Arch=x86_64 CPUEfctv=64 CPUTot=64 Gres=(null) RealMemory=100000 State=IDLE ThreadsPerCore=1 \
Partitions=cores.long
"""
SACCTMGR = "case $* in *qos*) echo 'short|04:00:00';; *) echo 'physics||short,normal';; esac"


@pytest.fixture
def slurm(desk: Desk) -> Callable[..., None]:
    """Put Slurm's commands on the desk, by default those of a cluster with GPUs of Slurm 22.05."""

    def put(config: str = CONFIG, partitions: str = PARTITIONS, nodes: str = NODES, sacctmgr: str = SACCTMGR) -> None:
        texts = {"config": config, "partition": partitions, "node": nodes}
        for name, text in texts.items():
            (desk.root / name).write_text(text)
        desk.program("scontrol", f'#!/bin/sh\nfor last; do :; done\ncat "{desk.root}/$last"\n')
        desk.program("sacctmgr", f"#!/bin/sh\n{sacctmgr}\n")
        for name in ("srun", "apptainer", "ip"):
            desk.program(name, f"#!/bin/sh\necho {name} version 1.2\n")

    return put
