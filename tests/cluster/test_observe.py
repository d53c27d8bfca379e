"""A plain DDP script on two nodes: its steps are shown, and the rank that does not join is named with its node."""

from __future__ import annotations

import json

import pytest

from .cluster import Cluster
from .runs import Alice, Run

pytestmark = pytest.mark.cluster

SCRIPT = """\
import os, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 101):
    while dist.get_rank() == 1 and step == 50 and not os.path.exists("/home/alice/scripts/release"):
        time.sleep(0.1)
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


#: Runs a command on a terminal of its own, which gets what stands on standard input.
TERMINAL = "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]) >> 8)"


def look_inside(alice: Alice, run: str, waits: str, image: str) -> None:
    """`stacks` shows that rank 1 sleeps and rank 0 is in backward; `attach` is beside rank 1, in its image."""
    told = json.loads(alice.command("debug", "stacks", run, "--json").stdout)
    answers = [(each["rank"], each["answer"]) for each in told["ranks"]]
    assert (answers, told["missing"]) == ([(0, "asked"), (1, "asked")], []), told
    first, second = (each["threads"][0] for each in told["ranks"])
    assert told["ranks"][1]["node"] == waits
    assert second[-1].endswith(('plain.py", line 9 in <module>', 'plain.py", line 10 in <module>')), second
    assert "in backward" in first[-2] and first[-1].endswith('plain.py", line 11 in <module>'), first
    other = alice.command("debug", "stacks", run, "--node", waits).stdout
    assert other.startswith(f"rank 1 on {waits}, process ") and "rank 0" not in other
    script = "import os, torch; print(*map(os.environ.get, ('SLURMDDP_NODE', 'GLOO_SOCKET_IFNAME')), torch.__version__)"
    done = alice.command("debug", "shell", run, "--node", waits, "--", "python3", "-c", script)
    assert done.stdout.split() == [waits, "ib0", "2.13.0+cpu"], done.stderr
    done = alice.command("debug", "shell", run, "--", "sh", "-c", "echo $APPTAINER_CONTAINER; exit 7", check=False)
    assert (done.returncode, done.stdout.strip()) == (7, image)
    typed = "tty; echo on $SLURMDDP_NODE; exit 5"
    shell = f"(sleep 5; echo '{typed}'; sleep 5) | python3 -c '{TERMINAL}' slurmddp debug shell {run} --node {waits}"
    done = alice.cluster.run("login", ["sh", "-c", shell], check=False)
    assert done.returncode == 5 and "/dev/pts/" in done.stdout and f"on {waits}" in done.stdout, done.stdout
    fetch_through(alice, run, waits)
    refused = alice.command("debug", "shell", run, "--node", "node3", check=False)
    assert refused.returncode == 2 and "has no ranks on node node3" in refused.stderr


def fetch_through(alice: Alice, run: str, node: str) -> None:
    """A page of a web server on the node, asked for on the login host."""
    serves = alice.cluster.popen(
        node, ["python3", "-m", "http.server", "7007", "-b", "127.0.0.1", "-d", "/home/alice/scripts"]
    )
    script = (
        f"coproc slurmddp debug port {run} 7007 --local-port 7070 --node {node} 2>&1;"
        " trap 'kill $COPROC_PID; wait' EXIT;"
        " until [[ $line == http* ]]; do read -r line; done <&${COPROC[0]}; echo $line; curl -sSf --max-time 20 http://127.0.0.1:7070/plain.py"
    )
    try:
        done = alice.cluster.run("login", ["bash", "-c", script], check=False)
    finally:
        serves.kill()
        serves.wait()
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"http://127.0.0.1:7070 leads to the node; Ctrl-C ends it\n{SCRIPT}"


def assert_doctor_names(alice: Alice, run: Run, node: str) -> None:
    """While it hangs: the rank, its node, and the collective that it did not join."""
    dumps = "trace/attempt-000/observed-*/hang-1/*.pickle"
    alice.cluster.wait_for(lambda: len(list(run.folder.glob(dumps))) == 2, "a dump of each rank", 60)
    done = alice.command("doctor", run.id, "--json", check=False)
    root = json.loads(done.stdout)["root"]
    assert (done.returncode, root["cause"], root["rank"], root["node"]) == (1, "hang", 1, node), done.stdout
    message = root["message"]
    assert message.startswith("the others waited for rank 1: ") and "did not join all_reduce" in message, done.stdout


def assert_the_wait_is_no_training(alice: Alice, run: Run, waited: float) -> None:
    """The lines' seconds, as status and goodput tell them, once the run is done."""
    spent = run.lines("metrics.jsonl")[-1]["seconds"]
    assert set(spent) <= {"compute", "network", "overlap"}, spent
    network = spent.get("network", 0)
    assert network > waited, spent
    assert json.loads(alice.command("status", run.id, "--json").stdout)["network_share"] > 0.5
    found = json.loads(alice.command("status", run.id, "--time", "--json", check=False).stdout)
    assert found["seconds"]["network"] == pytest.approx(network, abs=0.1)
    assert found["seconds"]["run"] == 0 < found["goodput"] < 0.2 and found["seconds"]["init"] > 0, found
    assert alice.command("doctor", run.id).stdout.startswith("no failure found")


@pytest.mark.long  # tests/runtime/test_observe.py names it without nodes
def test_the_node_of_a_rank_that_does_not_join_is_named(cluster: Cluster, torch_image: str) -> None:
    alice = Alice(cluster, torch_image)
    cluster.write("/home/alice/scripts/plain.py", SCRIPT)
    cluster.machine_path("/home/alice/scripts/release").unlink(missing_ok=True)  # of a first try
    run = alice.submit(
        "scripts/plain.py", "--site", "testcluster", "--image", torch_image, "--nodes", "2", "--time", "5m",
        "--set", "resources.ranks_per_node=1", "--set", "resources.cpus_per_node=1",
        "--set", "resources.mem_per_node=1500M", "--set", "timeouts.hang=5",
    )  # fmt: skip
    hang = run.wait_for_event("hang_reported", timeout=180)
    ranks = {int(row["rank"]): row["node"] for row in run.lines("events.jsonl") if row["event"] == "rank_started"}
    assert (hang["kind"], hang["ranks"], hang["step"]) == ("behind", [1], 49)
    assert set(hang["nodes"]) | set(ranks.values()) == {"node1", "node2"}, "rank 0 told of its start, rank 1 hangs"
    shown = cluster.run("login", ["slurmddp", "status", run.id], check=False).stdout
    assert f"hang     rank 1 on {hang['nodes'][0]}: hang: no progress in step at step 49" in shown
    assert_doctor_names(alice, run, hang["nodes"][0])
    look_inside(alice, run.id, waits=hang["nodes"][0], image=torch_image)
    cluster.write("/home/alice/scripts/release", "")
    status = run.wait("done")
    assert status["step"] == 100
    assert run.wait_for_event("hang_over")["nodes"] == hang["nodes"]
    stacks = sorted(path.name for path in run.folder.glob("trace/attempt-000/observed-*/hang-1/*.txt"))
    assert stacks == ["rank-00000.txt", "rank-00001.txt"]
    assert_the_wait_is_no_training(alice, run, hang["waited"])
