"""`check --per-node`: its lines, pasted on two hosts without Slurm (network namespaces), train and survive a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers import Desk
from tests.strangers import needs_root

from .harness import PATIENCE

#: Of a user: plain DDP, with our library. Rank 1 waits in step 20 of its first start until somebody has killed it.
SCRIPT = """
import os, time
import torch
import torch.distributed as dist
from slurmddp.runtime import Checkpointer

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
checkpointer = Checkpointer(model, optimizer, every_steps=5)
state = checkpointer.load()
for step in range(state.step + 1 if state else 1, 31):
    while step == 20 and os.environ["RANK"] == "1" and not state:
        with open(os.environ["SLURMDDP_RUN"] + "/pid", "w") as file:
            file.write(str(os.getpid()))
        time.sleep(0.1)
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if checkpointer.due(step):
        checkpointer.save(step)
checkpointer.finish()
print("rank", dist.get_rank(), "of", dist.get_world_size(), "on", os.environ["SLURMDDP_NODE"], "at", step, flush=True)
dist.destroy_process_group()
"""
HOSTS = ("10.99.0.1", "10.99.0.2")


@pytest.fixture
def names() -> Iterator[list[str]]:
    """Two network namespaces with a cable between them; their addresses there are HOSTS."""
    names = [f"per-node-{os.getpid()}-{number}" for number in range(2)]
    commands = [f"ip netns add {name}" for name in names]
    commands.append(f"ip -n {names[0]} link add eth9 type veth peer name eth9 netns {names[1]}")
    for name, address in zip(names, HOSTS, strict=True):
        commands += [f"ip -n {name} addr add {address}/24 dev eth9"]
        commands += [f"ip -n {name} link set {device} up" for device in ("eth9", "lo")]
    try:
        for command in commands:
            subprocess.run(command.split(), check=True)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False)


def pasted(printed: str, node: int, kind: str, run: Path) -> str:
    """What a user pastes on one node: the lines for each node, and its own one of the preflight or of the ranks."""
    first = "# First, on each node: "
    lines = printed.splitlines()
    own = [line for line in lines if line.startswith("env ") and f" -m slurmddp.runtime.{kind} " in line]
    assert len(own) == len(HOSTS), printed
    every = [line[len(first) :] for line in lines if line.startswith(first)]
    return "\n".join(["set -e", *every, "exec " + own[node]]).replace("RUN_FOLDER", str(run))


@needs_root
def test_two_hosts_without_slurm_train_and_survive_a_kill(tmp_path: Path, names: list[str]) -> None:
    desk = Desk(tmp_path)
    desk.write("train.py", SCRIPT)
    options = ["--site=generic", "--nodes=2", "--gpus-per-node=0", f"--venv={sys.prefix}"]

    def check(*words: str) -> str:
        command = [sys.executable, "-m", "slurmddp", "check", "train.py", *options, *words]
        return subprocess.run(command, cwd=desk.project, check=True, capture_output=True, text=True).stdout

    run = desk.project / "by-hand"
    check("--write", str(run))
    printed = check("--per-node", "--head", HOSTS[0])

    def start(kind: str) -> list[subprocess.Popen[str]]:
        return [
            subprocess.Popen(
                ["ip", "netns", "exec", name, "unshare", "--uts", "bash", "-c", f"hostname {name}; {text}"],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=desk.project,
            )
            for node, name in enumerate(names)
            for text in [pasted(printed, node, kind, run)]
        ]  # fmt: skip

    for process in start("preflight"):
        assert process.communicate(timeout=PATIENCE)[0].count(" ok") > 0 and process.returncode == 0
    agents = start("agent")
    try:
        await_that(lambda: any(run.glob("checkpoints/step-*15/COMPLETE")))
        await_that(lambda: (run / "pid").exists())
        os.kill(int((run / "pid").read_text()), signal.SIGKILL)
        said = "".join(process.communicate(timeout=PATIENCE)[0] for process in agents)
    finally:
        for process in agents:
            process.kill()
    assert [process.returncode for process in agents] == [0, 0], said
    for rank, name in enumerate(names):
        assert f"rank {rank} of 2 on {name} at 30" in said, said
    killed, *others = events(run, "rank_exited")  # rank 0 may lose its connection before its agent stops it
    assert [each["rank"] for each in others] in ([], [0]), others
    assert (killed["rank"], killed["node"], killed["signal"]) == (1, names[1], "SIGKILL"), killed
    assert any((run / "checkpoints").glob("step-*30/COMPLETE"))


def events(run: Path, name: str) -> list[dict[str, object]]:
    found = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [each for each in found if each["event"] == name]


def await_that(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)
