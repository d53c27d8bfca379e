"""launch.mode srun: Slurm starts each rank of a script that reads Slurm's variables, without torchrun."""

from __future__ import annotations

import json
import re

import pytest

from .cluster import Cluster
from .runs import Alice, Run

pytestmark = pytest.mark.cluster

#: Counts steps, which rank 0 saves. After a failure it goes on from there and is done soon; a SIGTERM ends it. A thread
#: sees the signal, also while a collective waits for ranks that are gone, and waits for the ranks that get it later:
#: their collective would fail first.
SCRIPT = """\
import json, os, pathlib, signal, sys, threading, time
import torch, torch.distributed as dist

here, names = pathlib.Path(sys.argv[1]), ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
slurm = [os.environ[f"SLURM_{name}"] for name in ("PROCID", "LOCALID", "NTASKS", "NTASKS_PER_NODE")]
here.mkdir(exist_ok=True)
facts = {"names": [os.environ[name] for name in names], "slurm": slurm}
(here / f"rank-{slurm[0]}").write_text(json.dumps(facts))

def end():
    os.read(seen, 1)
    (here / f"term-{slurm[0]}").write_text("")
    until = time.monotonic() + 3
    while time.monotonic() < until and len(list(here.glob("term-*"))) < int(slurm[2]):
        time.sleep(0.05)
    os._exit(1)

seen, wake = os.pipe()
os.set_blocking(wake, False)
signal.set_wakeup_fd(wake)
signal.signal(signal.SIGTERM, lambda *_: None)
threading.Thread(target=end, daemon=True).start()
dist.init_process_group("gloo", rank=int(slurm[0]), world_size=int(slurm[2]))
saved = here / "step"
first = int(saved.read_text()) if saved.exists() else 0
for step in range(first + 1, first + 6 if first else 10**6):
    dist.all_reduce(torch.ones(1))
    time.sleep(0.1)
    if dist.get_rank() == 0:
        saved.with_suffix(".part").write_text(str(step))
        saved.with_suffix(".part").rename(saved)
print(f"rank {dist.get_rank()} went on from step {first}", flush=True)
"""


def submitted(alice: Alice, folder: str, *options: str) -> Run:
    alice.cluster.write("/home/alice/tasks/own.py", SCRIPT)
    alice.cluster.run("login", ["rm", "-rf", folder])  # of a first try
    resources = {"nodes": "2", "ranks_per_node": "2", "cpus_per_node": "2", "mem_per_node": "2500M", "time": "5m"}
    settings = [word for key, value in resources.items() for word in ("--set", f"resources.{key}={value}")]
    own = ("--site", "testcluster", "--image", alice.image, "--set", "launch.mode=srun", *settings, *options)
    run = alice.submit("tasks/own.py", *own, "--", folder)
    step = alice.cluster.machine_path(f"{folder}/step")
    alice.cluster.wait_for(lambda: step.exists() and int(step.read_text()) > 3, "the ranks train", 120)
    return run


def test_a_killed_rank_leads_to_a_new_attempt_that_resumes(cluster: Cluster, torch_image: str) -> None:
    run = submitted(Alice(cluster, torch_image), "/home/alice/tasks/killed")
    facts = [
        json.loads(path.read_text()) for path in sorted(cluster.machine_path("/home/alice/tasks/killed").glob("rank-*"))
    ]
    started = run.wait_for_event("attempt_started")["nodes"].split()
    assert [each["names"] for each in facts] == [[str(n), str(n % 2), "4", "2", started[0]] for n in range(4)]
    assert [each["slurm"] for each in facts] == [[str(n), str(n % 2), "4", "2"] for n in range(4)]
    node, pid, _ = next(found for found in run.processes("RANK=3") if "own.py" in found[2])
    cluster.run(node, ["kill", "-9", str(pid)], user="root")
    status = run.wait("done")
    ended = [row for row in run.lines("events.jsonl") if row["event"] == "attempt_ended"]
    assert [row["decision"] for row in ended] == ["next", "done"], status
    assert (ended[0]["rank"], ended[0]["node"]) == (3, node), ended[0]
    assert all(f"rank {rank} went on from step" in run.logs() for rank in range(4))
    assert "went on from step 0" not in run.logs()


#: Knows of no start before: it goes on from the save that it is told of, which rank 0 writes into the run.
RESUMES = """\
import os, pathlib, sys, time
import torch, torch.distributed as dist

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
words = sys.argv[1:]
first = torch.load(words[1])["step"] if words else 0
dist.init_process_group("gloo", rank=rank, world_size=size)
print(f"rank {rank} was given {words} and went on from step {first}", flush=True)
folder = pathlib.Path(os.environ["SLURMDDP_RUN"]) / "checkpoints"
for step in range(first + 1, first + 6 if first else 10**6):
    dist.all_reduce(torch.ones(1))
    time.sleep(0.2)
    if rank == 0:
        folder.mkdir(exist_ok=True)
        torch.save({"step": step}, folder / "part.tmp")
        (folder / "part.tmp").rename(folder / "last.pt")
"""


@pytest.mark.long
def test_all_ranks_of_all_nodes_are_given_the_same_save(cluster: Cluster, torch_image: str) -> None:
    alice = Alice(cluster, torch_image)
    cluster.write("/home/alice/tasks/resumes.py", RESUMES)
    resources = {"nodes": "2", "ranks_per_node": "2", "cpus_per_node": "2", "mem_per_node": "2500M", "time": "5m"}
    settings = [word for key, value in resources.items() for word in ("--set", f"resources.{key}={value}")]
    run = alice.submit(
        "tasks/resumes.py", "--site", "testcluster", "--image", alice.image, "--set", "launch.mode=srun", *settings,
        "--set", "train.resume_args=[--resume, '{checkpoint}']",
    )  # fmt: skip
    saved = run.folder / "checkpoints" / "last.pt"
    cluster.wait_for(saved.exists, "rank 0 has saved", 120)
    node, pid, _ = next(found for found in run.processes("RANK=3") if "resumes.py" in found[2])
    cluster.run(node, ["kill", "-9", str(pid)], user="root")
    status = run.wait("done")
    told = re.findall(r"rank (\d) was given \[(.*)\] and went on from step (\d+)", run.logs())
    first, second = told[:4], told[4:]
    assert sorted(rank for rank, _, _ in first) == sorted(rank for rank, _, _ in second) == list("0123"), status
    assert {words for _, words, _ in first} == {""} and len({(words, step) for _, words, step in second}) == 1, told
    assert second[0][1].startswith("'--resume', '") and int(second[0][2]) > 0, told


@pytest.mark.long
@pytest.mark.parametrize("nodes", [2, 1])
def test_a_signal_of_slurm_reaches_each_rank(cluster: Cluster, torch_image: str, nodes: int) -> None:
    """On one node, the ranks meet in a file, and no store of theirs listens."""
    run = submitted(Alice(cluster, torch_image), "/home/alice/tasks/signalled", "--set", f"resources.nodes={nodes}")
    node, look = run.wait_for_event("attempt_started")["nodes"].split()[0], "find /tmp/slurmddp-1000 -name 'group-*'"
    met = cluster.sh(node, look, user="root").stdout.splitlines()
    assert [path.rpartition("/")[2] for path in met] == ["group-0"] * (nodes == 1)
    ports = [line.split()[3] for line in cluster.sh(node, "ss -Hltnp | grep python", user="root").stdout.splitlines()]
    assert nodes > 1 or {port.rpartition(":")[0] for port in ports} == {"127.0.0.1"}, ports  # gloo's
    cluster.run("login", ["scancel", "--signal=TERM", run.job_id], user="root")
    folder = cluster.machine_path("/home/alice/tasks/signalled")
    cluster.wait_for(lambda: len(list(folder.glob("term-*"))) == 2 * nodes, "each rank has the signal", 30)
    cluster.run("login", ["scancel", run.job_id], user="root")
    run.wait("cancelled", "stopped", "failed", "done")
