"""What bob, another user of the same nodes, can do to the rendezvous of alice's runs."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests import storeclient

from .cluster import Cluster
from .runs import NO_PREFLIGHT, Alice, Run

PLANTED = "/tmp/planted-by-bob"
#: All that bob needs to know is in the command line of an agent.
LOOK = "tr '\\0' ' ' </proc/{pid}/cmdline"
#: What a client of torch's store sends first, VALIDATE and PING, and what it gets for that.
ASK = """
import socket, sys
try:
    with socket.create_connection((sys.argv[1], int(sys.argv[2])), 5) as connection:
        connection.sendall(bytes([0, 0xCE, 0xF7, 0x85, 0x3C, 13, 1, 0, 0, 0]))
        print(connection.recv(100).hex())
except OSError as error:
    print(type(error).__name__)
"""


@pytest.fixture(scope="module")
def alice(cluster: Cluster, torch_image: str) -> Alice:
    cluster.write("/home/bob/storeclient.py", Path(storeclient.__file__).read_text(), mode=0o755)
    return Alice(cluster, torch_image)


def agent(run: Run) -> tuple[str, int]:
    return next((node, pid) for node, pid, command in run.processes() if "-m slurmddp.runtime.agent" in command)


def bob_plants(cluster: Cluster, node: str, command_line: str, at: int = 0) -> None:
    """A rendezvous state that runs code, and keys of the store that agents and ranks believe."""
    head, port = re.findall(r"--rdzv-endpoint=(\S+):(\d+)", command_line)[0]
    name = "torch.rendezvous." + re.findall(r"--rdzv-id=(\S+)", command_line)[0]
    keys = [f"{name}.{at}/MASTER_ADDR=127.6.6.6", f"{name}.{at}/slurmddp/ranks_store=x", f"{name}=@pickle:{PLANTED}"]
    cluster.run(node, ["python3", "/home/bob/storeclient.py", head, port, *keys], user="bob")


def test_bob_ends_an_attempt_at_most_and_runs_no_code(alice: Alice) -> None:
    cluster = alice.cluster
    run = alice.submit(alice.job_file("attacked", train={"steps": 100000}, network={"store_tls": False}))
    run.wait_for_step(5)
    while not any(run.folder.glob("checkpoints/step-*/COMPLETE")):
        time.sleep(0.1)
    node, pid = agent(run)
    seen = cluster.sh(node, LOOK.format(pid=pid), user="bob").stdout
    assert "key" not in seen.split("--rdzv")[0].replace("rendezvous.key", "")
    assert cluster.run(node, ["cat", f"{run.answer['run_folder']}/rendezvous.key"], user="bob", check=False).returncode
    # From the other node of the job: the store of two nodes has to listen on the network.
    bob_plants(cluster, next(name for name in ("node1", "node2") if name != node), seen)
    resumed = run.wait_for_event("resumed", lambda row: row["attempt"] == 1, timeout=120)
    assert resumed["step"] > 0
    for host in ("node1", "node2"):
        assert not cluster.sh(host, f"ls {PLANTED}", user="root", check=False).stdout
    logs = run.logs()
    assert "somebody else changed the state of rendezvous" in logs, logs
    cause = run.wait_for_event("attempt_ended")["cause"]
    assert "somebody else" in cause, cause
    alice.command("cancel", run.id, "--wait", timeout=90)


def test_bob_gets_nothing_from_the_ranks_store(alice: Alice) -> None:
    """With TLS between two nodes: on the ports of the agents' and the ranks' stores, from both nodes."""
    cluster = alice.cluster
    run = alice.submit(alice.job_file("encrypted", train={"steps": 100000}, recovery=NO_PREFLIGHT))
    run.wait_for_step(5)
    opened = [row for row in run.lines("events.jsonl") if row["event"] == "store_open"]
    assert all("its kernel refuses a filter" in row["why"] for row in opened), opened
    for node in ("node1", "node2"):
        ours = cluster.sh(node, "ss -Hltnp", user="root").stdout.splitlines()
        agents = {
            str(pid) for at, pid, command in run.processes() if at == node and "slurmddp.runtime.agent" in command
        }
        stores = [line.split()[3] for line in ours if agents & set(re.findall(r"pid=(\d+)", line))]
        assert stores, ours
        for host, _, port in (each.rpartition(":") for each in stores):
            if opened and host == "127.0.0.1" and f"127.0.0.2:{port}" in stores:
                continue  # the store itself, on a kernel that does not let alice filter its port: `status` says so
            told = cluster.run(node, ["python3", "-c", ASK, host, port], user="bob", check=False)
            assert told.stdout.strip() in ("", "TimeoutError", "ConnectionResetError"), (node, host, port, told.stdout)
    run.wait_for_step(max(row["step"] for row in run.metrics()) + 5)
    assert not [row for row in run.lines("events.jsonl") if row["event"] in ("forged", "resumed")]
    alice.command("cancel", run.id, "--wait", timeout=90)


def test_on_one_node_nothing_listens_beyond_loopback(alice: Alice) -> None:
    cluster = alice.cluster
    run = alice.submit(alice.job_file("alone", resources={"nodes": 1}, train={"steps": 100000}, recovery=NO_PREFLIGHT))
    run.wait_for_step(2)
    node, pid = agent(run)
    seen = cluster.sh(node, "ss -Hltnp", user="root").stdout.splitlines()
    ours = {str(process) for at, process, command in run.processes() if at == node and "python3 -" in command}
    listening = [line.split()[3] for line in seen if ours & set(re.findall(r"pid=(\d+)", line))]
    assert len(listening) >= 2, "the ranks' store, and gloo's"
    assert {address.rpartition(":")[0] for address in listening} == {"127.0.0.1"}, "\n".join(seen)
    # On the same node, bob finds no port of the agents' store.
    command_line = cluster.sh(node, LOOK.format(pid=pid), user="bob").stdout
    head, port = re.findall(r"--rdzv-endpoint=(\S+):(\d+)", command_line)[0]
    client = ["python3", "/home/bob/storeclient.py", head, port, "torch.rendezvous=x"]
    refused = cluster.run(node, client, user="bob", check=False)
    assert refused.returncode and "ConnectionRefusedError" in refused.stderr, refused.stderr
    assert "somebody else" not in run.logs()
    alice.command("cancel", run.id, "--wait", timeout=90)
