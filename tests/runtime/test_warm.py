"""recovery.spares_warm on one node: the agents of all attempts are forks of one process, which may die."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurmddp.runtime.agent import forking, warm
from slurmddp.supervisor import ranks, sweep

from .harness import PATIENCE
from .test_forking import environment

#: Forks of one process have one hash seed.
SCRIPT = """\
import os, sys, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank, attempt = dist.get_rank(), os.environ["SLURMDDP_ATTEMPT"]
os.write(1, f"rank {rank} of attempt {attempt}\\n".encode())  # whole: print writes the end of a line by itself
with open(f"told-{attempt}-{rank}.part", "w") as file:
    file.write(f"{os.getpid()} {hash('signature of one process')}")
os.rename(file.name, f"told-{attempt}-{rank}")
while not os.path.exists(f"enough-{attempt}"):
    time.sleep(0.05)
sys.exit(int(open(f"enough-{attempt}").read()))
"""


def wait_for(done: Callable[[], object], log: Path) -> None:
    end = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.05)


class Node:
    """A node whose steps run node.sh's last command."""

    def __init__(self, root: Path) -> None:
        self.root, self.log = root, root / "log"
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, attempt: str) -> "subprocess.Popen[bytes]":
        name = f"{self.root}-{attempt}"
        os.environ.update(SLURMDDP_ATTEMPT=attempt.replace("warm", "0"), SLURMDDP_RENDEZVOUS_ID=name)
        command = [sys.executable, "-m", "slurmddp.runtime.agent", str(self.root), "--nnodes=1", "--nproc-per-node=2"]
        command += ["--rdzv-backend=slurmddp-c10d", "--rdzv-endpoint=localhost:0", "--rdzv-conf=is_host=1"]
        command += [f"--rdzv-id={name}", "--max-restarts=0", "-m", "slurmddp.runtime.begin", "train.py"]
        with self.log.open("a") as log:
            self.processes.append(subprocess.Popen(command, stdout=log, stderr=log))
        return self.processes[-1]

    def told(self, attempt: str) -> list[list[str]]:
        """The process ids of both ranks, and their signatures."""
        paths = [self.root / f"told-{attempt}-{rank}" for rank in range(2)]
        wait_for(lambda: all(path.exists() for path in paths), self.log)
        return [list(each) for each in zip(*(path.read_text().split() for path in paths), strict=True)]

    def left(self, attempt: str) -> list[int]:
        """The processes of an attempt, as the cleanup finds them."""
        found = [pid for pid, process in sweep.processes().items() if process.mine]
        ids = {pid: ranks.environment(pid).get("SLURMDDP_RENDEZVOUS_ID") for pid in found}
        return [pid for pid, name in ids.items() if name == f"{self.root}-{attempt}"]

    def cold(self) -> list[str]:
        """Why agents were started, not forked."""
        path = self.root / "events.jsonl"
        events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        assert not [event for event in events if event["event"] == "not_forked"]
        return [event["why"] for event in events if event["event"] == "not_warm"]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    (tmp_path / "train.py").write_text(SCRIPT)
    key = tmp_path / "rendezvous.key"
    key.touch(0o600)
    key.write_bytes(os.urandom(64))
    node = Node(tmp_path)
    with environment(tmp_path, SLURMDDP_FORK="1", SLURMDDP_NODE="here", SLURMDDP_WARM=f"{tmp_path}-warm"):
        os.environ["SLURMDDP_RUN"] = str(tmp_path)
        try:
            yield node
        finally:
            for process in node.processes:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                process.wait()


@pytest.mark.ranks(2)
@pytest.mark.long  # tests/cluster/test_warm.py
def test_each_attempt_is_a_fork_until_the_warm_process_dies(node: Node) -> None:
    parent = node.start("warm")
    signatures = []

    killed = node.start("0")  # as Slurm kills a step
    pids, seeds = node.told("0")
    signatures += seeds
    assert {int(pid) for pid in pids} <= {*node.left("0")}
    assert [rank.number for rank in ranks.ranks_of(f"{node.root}-0")] == [0, 1]
    killed.kill()
    killed.wait()
    wait_for(lambda: not node.left("0"), node.log)

    terminated = node.start("1")
    signatures += node.told("1")[1]
    terminated.terminate()
    assert terminated.wait(PATIENCE) == 1 and not node.left("1")

    for attempt, code in (("2", 0), ("3", 5)):
        agent = node.start(attempt)
        signatures += node.told(attempt)[1]
        (node.root / f"enough-{attempt}").write_text(str(code))
        assert agent.wait(PATIENCE) == bool(code)
    assert len(set(signatures)) == 1 and not node.cold()
    assert {f"rank {rank} of attempt {attempt}" for rank in range(2) for attempt in range(4)} <= {
        *node.log.read_text().splitlines()
    }

    os.environ["OMP_NUM_THREADS"] = "5"
    with pytest.raises(forking.NotPossible, match="OMP_NUM_THREADS changed since"):
        warm.be_agent(["run", "options"])
    os.environ["OMP_NUM_THREADS"] = "2"
    agent = node.start("4")
    node.told("4")
    parent.terminate()  # as Slurm does when the job ends: what trains may still save
    time.sleep(2)
    assert parent.poll() is None and agent.poll() is None
    (node.root / "enough-4").write_text("0")
    assert agent.wait(PATIENCE) == parent.wait(PATIENCE) == 0
    agent = node.start("5")
    assert node.told("5")[1][0] not in signatures
    (node.root / "enough-5").write_text("0")
    assert agent.wait(PATIENCE) == 0
    assert node.cold() == ["no warm process on this node: logs/warm may say why"]


def test_the_events_of_a_rendezvous_have_the_names_that_torch_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    from slurmddp.runtime import torch_private

    def record() -> str:
        return str(dynamic_rendezvous.get_method_name())

    def join() -> str:
        return record()

    plain = dynamic_rendezvous.get_method_name
    monkeypatch.setattr(dynamic_rendezvous, "get_method_name", plain)
    assert join() == "join"
    torch_private.name_methods_by_frame()
    assert dynamic_rendezvous.get_method_name is not plain and join() == "join"
