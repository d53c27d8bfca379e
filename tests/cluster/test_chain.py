"""The chain of `exec`: while training runs, nothing of ours stands between Slurm and torchrun.

Where cgroups track processes, a signal other than SIGKILL reaches only slurmstepd's direct child: a shell there would
keep it from torchrun.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from .cluster import Cluster
from .runs import NO_PREFLIGHT, Alice, Run

pytestmark = pytest.mark.cluster

APPTAINER = "Apptainer runtime parent"


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    command: str


def processes(cluster: Cluster, node: str) -> dict[int, Process]:
    """Everything on a node, by pid."""
    found = {}
    for line in cluster.sh(node, "ps -eo pid=,ppid=,args= -ww", user="root").stdout.splitlines():
        pid, parent, command = line.split(None, 2)
        found[int(pid)] = Process(int(pid), int(parent), command)
    return found


def chain(found: dict[int, Process], pid: int) -> list[str]:
    """The commands above a process, nearest first, up to Slurm's own for the step."""
    commands = []
    while not commands or not commands[-1].startswith("slurmstepd"):
        pid = found[pid].parent
        commands.append(found[pid].command)
    return commands


def kind(command: str) -> str:
    if command.startswith("slurmstepd"):
        return "slurmstepd"
    if command.startswith(APPTAINER):
        return "apptainer"
    return "torchrun" if "-m slurmddp.runtime.agent " in command else command


@pytest.fixture(scope="module")
def run(cluster: Cluster, torch_image: str) -> Run:
    alice = Alice(cluster, torch_image)
    # As many nodes as there may be lost: with the guard.
    elastic, lasting = {"nodes": {"min": 1, "max": 2}}, {"steps": 100000, "trace_samples": False}
    run = alice.submit(alice.job_file("chain", resources=elastic, train=lasting, recovery=NO_PREFLIGHT))
    run.wait_for_step(2)
    return run


def test_between_slurm_and_the_ranks_is_torchrun_alone(cluster: Cluster, run: Run) -> None:
    ranks = 0
    for node in cluster.nodes:
        found = processes(cluster, node)
        ours = {pid for name, pid, _ in run.processes() if name == node}
        for process in found.values():
            is_rank = "-m slurmddp.runtime.train " in process.command and kind(process.command) != "torchrun"
            if process.pid in ours and is_rank:
                ranks += 1
                assert [kind(each) for each in chain(found, process.pid)] == ["torchrun", "apptainer", "slurmstepd"]
    assert ranks == 4


def test_the_shells_that_are_left_are_job_sh_and_the_guard(cluster: Cluster, run: Run) -> None:
    """job.sh with what it started on the batch host, and the guard's own step, where the run has one."""
    for node in cluster.nodes:
        found = processes(cluster, node)
        shells = [each for each in found.values() if each.command.split()[0].rsplit("/", 1)[-1] in ("bash", "sh")]
        ours = {pid for name, pid, _ in run.processes() if name == node}
        for shell in shells:
            if shell.pid in ours:
                assert "slurm_script" in shell.command or "guard" in shell.command, shell


def test_it_ends_when_it_is_cancelled(cluster: Cluster, run: Run) -> None:
    cluster.run("login", ["scancel", run.job_id])
    run.wait("cancelled")
    cluster.wait_for(lambda: not run.processes(), f"no process is left: {run.processes()}", 20)
