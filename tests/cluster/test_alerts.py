"""Alerts on a real Slurm: the watchdog job, addresses that nobody finds, and nodes without internet."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.receiver import Received, recorded

from .cluster import Cluster
from .runs import Alice, Run

pytestmark = pytest.mark.cluster

SECRET = "B1SECRETabcdefghijklmnopq"
HOSTS = ("ctl", "login", "node1", "node2", "node3")

#: What stands for the ranks: it needs no image, and ends when ~/told/go or the stop file is there.
PYTHON = """#!/bin/bash
[[ "$1" != -c ]] || exit 0
for ((i = 0; i < 600; i++)); do [[ ! -e ~/told/go && ! -e "$SLURMDDP_STOP_FILE" ]] || exit 0; sleep 0.2; done
"""


class Inbox:
    """The receiver on the login host, as a real webhook: anybody in the network can post to its address."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.folder = "/home/alice/told/inbox"
        cluster.sh("login", f"rm -rf ~/told/go {self.folder}; mkdir -p ~/told")
        self._process = cluster.popen("login", ["python3", "/opt/slurmddp/tests/receiver.py", self.folder])
        port = cluster.machine_path(f"{self.folder}/port")
        cluster.wait_for(port.exists, "the receiver listens", 20)
        self.url = f"http://login:{port.read_text()}/services/T0/{SECRET}"

    def mode(self, mode: str) -> None:
        self.cluster.write(f"{self.folder}/mode", mode)

    @property
    def received(self) -> list[Received]:
        return recorded(self.cluster.machine_path(self.folder))

    def kinds(self) -> list[str]:
        return [request.json()["kind"] for request in self.received if request.answer == 200]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(10)


@pytest.fixture
def inbox(cluster: Cluster) -> Iterator[Inbox]:
    inbox = Inbox(cluster)
    yield inbox
    cluster.sh("login", "touch ~/told/go")  # whatever still runs may end
    inbox.close()


@pytest.fixture
def alice(cluster: Cluster) -> Alice:
    return profiles(cluster)


def profiles(cluster: Cluster) -> Alice:
    """Alice, with profiles of her own: with a watchdog job, one of them without requeue; and nodes without internet."""
    site = {"name": "told", "title": "with a watchdog job", "bases": ["testcluster"], "alerts": {"from": "node"}}
    site["watchdog"] = {"partition": "debug", "time": "2m", "sbatch": ["--mem=100M", "--cpus-per-task=1"]}
    chain = {**site, "name": "chain", "title": "no requeue", "requeue": "chain"}
    shut = {"name": "shut", "title": "no internet", "bases": ["testcluster"], "alerts": {"from": "login"}}
    for profile in (site, chain, shut):
        cluster.write(f"/home/alice/.config/slurmddp/sites/{profile['name']}.yaml", yaml.safe_dump(profile))
    cluster.write("/home/alice/told/python", PYTHON, mode=0o755)
    cluster.write("/home/alice/told/train.py", "")
    return Alice(cluster, "")


def submit(alice: Alice, inbox: Inbox, site: str = "told", **changes: Any) -> Run:
    job = {
        "name": "told",
        "site": site,
        "resources": {"nodes": 1, "ranks_per_node": 1, "cpus_per_node": 1, "mem_per_node": "200M", "time": "10m"},
        "container": {"runtime": "none", "python": "/home/alice/told/python"},
        "recovery": {"preflight": False},
        "train": {"script": "told/train.py"},
        "alerts": [{"to": "json", "url_env": "HOOK", "insecure": True, "on": ["failed"]}],
        **changes,
    }
    alice.cluster.write("/home/alice/told/job.yaml", yaml.safe_dump(job))
    done = alice.cluster.sh("login", f"HOOK={inbox.url} slurmddp submit told/job.yaml --json")
    return Run(alice.cluster, json.loads(done.stdout))


def watchdog(run: Run, outcome: str, timeout: float = 60) -> dict[str, Any]:
    return run.wait_for_event("watchdog", lambda row: row["outcome"] == outcome, timeout)


def states(run: Run) -> dict[str, str]:
    """State and unfulfilled dependency of the run's job and of its watchdog job, by number."""
    lines = run.cluster.run("login", ["squeue", "--noheader", "--format=%i %T %E"]).stdout.splitlines()
    return {line.split(" ", 1)[0]: line.split(" ", 1)[1] for line in lines}


def sender(run: Run, *words: str) -> list[str]:
    """The command that sends an alert of the run from one of its nodes."""
    folder = run.answer["run_folder"]
    code = f"{folder}/code"
    return ["bash", f"{code}/python.sh", "", f"{code}/slurmddp.zip", "alert", folder, *words]


def kill_script(run: Run, *, guard: bool) -> None:
    """SIGKILL of the job's script; guard: before that, of the guard, which would bring the job back."""
    wait_for_guard(run, 30)
    if guard:
        kill_guard(run)
    run.cluster.run("login", ["scancel", "--signal=KILL", "--batch", run.job_id])


def guards(run: Run) -> list[tuple[str, int]]:
    return [
        (node, pid)
        for node, pid, command in run.processes()
        if "slurmddp.zip guard" in command and "srun" not in command
    ]


def wait_for_guard(run: Run, timeout: float) -> None:
    run.cluster.wait_for(lambda: bool(guards(run)), "the guard has begun", timeout)


def kill_guard(run: Run) -> None:
    for node, pid in guards(run):
        run.cluster.run(node, ["kill", "-KILL", str(pid)], check=False)  # with its shell went its sleep's


def test_a_script_that_is_killed_is_brought_back_and_told_of(alice: Alice, inbox: Inbox) -> None:
    run = submit(
        alice, inbox, alerts=[{"to": "json", "url_env": "HOOK", "insecure": True, "on": ["failed", "requeued"]}]
    )
    kill_script(run, guard=False)
    run.wait_for_event("requeued")
    run.wait_for_event("alert", lambda row: row["delivered"])
    assert inbox.kinds() == ["requeued"] and "job.sh was killed by SIGKILL" in inbox.received[0].json()["cause"]
    alice.cluster.sh("login", "touch ~/told/go")
    run.wait("done")


@pytest.mark.long
def test_a_guard_that_is_killed_is_started_again(alice: Alice, inbox: Inbox) -> None:
    run = submit(
        alice, inbox, alerts=[{"to": "json", "url_env": "HOOK", "insecure": True, "on": ["failed", "requeued"]}]
    )
    wait_for_guard(run, 30)
    kill_guard(run)
    run.cluster.wait_for(lambda: "the guard has died" in run.logs(), "its end is seen", 30)
    wait_for_guard(run, 60)
    kill_script(run, guard=False)
    run.wait_for_event("requeued")
    run.wait_for_event("alert", lambda row: row["delivered"])
    assert inbox.kinds() == ["requeued"]
    alice.cluster.sh("login", "touch ~/told/go")
    run.wait("done")


def test_a_script_that_is_killed_is_told_of_by_the_dead_man_job(alice: Alice, inbox: Inbox) -> None:
    run = submit(alice, inbox)
    run.wait_for_event("job_started")
    assert f"PENDING afterany:{run.job_id}(unfulfilled)" in states(run).values()
    kill_script(run, guard=True)
    watchdog(run, "alerted")
    run.wait_for_event("alert", lambda row: row["delivered"])
    (request,) = inbox.received
    found = request.json()
    assert (found["kind"], found["state"], found["job_id"], found["run"]) == ("failed", "FAILED", run.job_id, run.id)
    assert found["node"] and f"node {found['node']}" in found["cause"]
    log = alice.cluster.run("login", ["cat", run.answer["run_folder"] + "/logs/watchdog.log"]).stdout
    assert "alert: " in log


@pytest.mark.long
def test_it_waits_through_a_requeue_and_says_nothing_of_what_a_trap_has_told(alice: Alice, inbox: Inbox) -> None:
    run = submit(alice, inbox)
    run.wait_for_event("job_started")
    alice.cluster.run("login", ["scontrol", "requeue", run.job_id])
    alice.cluster.wait_for(lambda: states(run).get(run.job_id, "").startswith("PENDING"), "the job is queued again", 30)
    assert f"PENDING afterany:{run.job_id}(unfulfilled)" in states(run).values()
    run.wait_for_event("job_started", lambda row: row["attempt"] > 0)
    alice.cluster.sh("login", "touch ~/told/go")
    watchdog(run, "no alert")
    assert inbox.kinds() == []


@pytest.mark.long
def test_it_follows_a_chain_of_jobs(alice: Alice, inbox: Inbox) -> None:
    """The site forbids requeues: the run goes on as another job, which the watchdog job then waits for."""
    alerts = [{"to": "json", "url_env": "HOOK", "insecure": True, "on": ["started", "requeued", "failed", "finished"]}]
    run = submit(alice, inbox, "chain", alerts=alerts, recovery={"preflight": False, "requeue": "always"})
    run.wait_for_event("attempt_started")
    alice.cluster.run("login", ["scancel", "--signal=USR2", "--batch", run.job_id])
    following = str(run.wait_for_event("requeued")["next_job"])
    assert following != run.job_id
    watchdog(run, "waits")
    run.wait_for_event("job_started", lambda row: row["job_id"] == following)
    assert f"PENDING afterany:{following}(unfulfilled)" in states(run).values()
    alice.cluster.sh("login", "touch ~/told/go")
    watchdog(run, "no alert", timeout=90)
    assert inbox.kinds() == ["started", "requeued", "finished"]


@pytest.mark.long
def test_a_job_that_is_cancelled_in_the_queue_is_no_news(alice: Alice, inbox: Inbox) -> None:
    resources = {"nodes": 1, "ranks_per_node": 1, "cpus_per_node": 1, "mem_per_node": "200M", "time": "10m"}
    run = submit(alice, inbox, resources={**resources, "sbatch_extra": ["--begin=now+3600"]})
    alice.cluster.run("login", ["scancel", run.job_id])
    assert watchdog(run, "no alert")["state"] == "CANCELLED"
    assert inbox.received == []


def test_the_address_is_nowhere(alice: Alice, inbox: Inbox) -> None:
    """Neither Slurm nor any process or file of the run shows it, while a message is on its way and afterwards."""
    inbox.mode("slow:8")
    # The log holds it, as if a careless script had printed it; the message's excerpt must not.
    setup = [f"printf '%s\\n' http://login/services/T0/{SECRET[:10]}\"{SECRET[10:]}\"", "echo before"]
    run = submit(
        alice, inbox, setup=setup, alerts=[{"to": "json", "url_env": "HOOK", "insecure": True, "on": ["hang"]}]
    )
    run.wait_for_event("job_started")
    node = run.wait_for_event("job_started")["node"]
    log = run.folder / f"logs/attempt-000/{node}.log"
    alice.cluster.wait_for(lambda: log.exists() and SECRET in log.read_text(), "the ranks' log holds the address", 30)
    sending = alice.cluster.popen(node, sender(run, "hang", "RUNNING", f"{node}: hang"))
    alice.cluster.wait_for(lambda: len(inbox.received) == 1, "the message is on its way", 30)
    search = (
        "for p in /proc/[0-9]*; do [ $p = /proc/$$ ] || cat $p/cmdline $p/environ; done 2>/dev/null | tr '\\0' '\\n';"
        " ps -efww; cat /tmp/slurmddp* 2>/dev/null"
    )
    seen = {host: alice.cluster.sh(host, search, user="root", check=False).stdout for host in HOSTS}
    assert "--config -" in seen[node], "curl is running"
    seen["job"] = alice.cluster.run("login", ["scontrol", "show", "job", "-dd", run.job_id]).stdout
    seen["script"] = alice.cluster.run("login", ["scontrol", "write", "batch_script", run.job_id, "-"]).stdout
    assert [name for name, text in seen.items() if SECRET in text] == []
    assert sending.wait(60) == 0
    (request,) = inbox.received
    assert SECRET not in request.body and "[secret]\nbefore" in request.json()["log_tail"]
    with_it = [path for path in run.folder.rglob("*") if path.is_file() and SECRET in path.read_text(errors="replace")]
    assert with_it == [log], "only where the script itself has printed it"
    spools = alice.cluster.sh(node, f"grep -rl {SECRET} /var/spool/slurmd /var/log; true", user="root").stdout
    spools += alice.cluster.sh("ctl", f"grep -rl {SECRET} /var/lib/slurm /var/log; true", user="root").stdout
    assert spools == ""
    kept = alice.cluster.sh("login", "cd ~/.config/slurmddp/secrets && ls -ld . * */json").stdout
    assert [line[:10] for line in kept.splitlines() if run.id in line] == ["drwx------", "-rw-------"]


def test_nodes_without_internet_leave_it_to_the_login_node(alice: Alice, inbox: Inbox) -> None:
    run = submit(alice, inbox, "shut", alerts=[{"to": "json", "url_env": "HOOK", "insecure": True, "on": ["hang"]}])
    node = run.wait_for_event("job_started")["node"]
    command = sender(run, "hang", "RUNNING", "no rank is behind the others")
    alice.cluster.run(node, command)
    assert inbox.received == []
    status = alice.command("status", run.id, check=False)
    assert "sent 1 delayed alert" in status.stderr and inbox.kinds() == ["hang"]
    time.sleep(1)  # the key of a hang has its second
    alice.cluster.run(node, command)
    inbox.mode("error")
    assert alice.command("alert", "watch", "--once", run.id, check=False).returncode == 1
    inbox.mode("ok")
    assert alice.command("alert", "watch", "--once").returncode == 0
    assert inbox.kinds() == ["hang", "hang"]
    assert not list(Path(run.folder, "alerts/spool").iterdir())


@pytest.mark.long
def test_accounting_tells_what_the_controller_has_forgotten(cluster: Cluster) -> None:
    with Cluster.started(f"{cluster.name}-told", accounting=True) as other:
        inbox, alice = Inbox(other), profiles(other)
        run = submit(alice, inbox)
        kill_script(run, guard=True)
        assert watchdog(run, "alerted")["watchdog"] != ""
        run.wait_for_event("alert")
        # As long after that the controller knows the job no more, nor the run's events of a watchdog job.
        asked = ["sacct", "--noheader", "--allocations", "--format=State", f"--jobs={run.job_id}"]
        other.wait_for(lambda: "FAILED" in other.run("login", asked).stdout, "accounting knows the job's end", 60)
        folder = run.answer["run_folder"]
        other.sh("login", f"mkdir ~/gone; ln -s /bin/false ~/gone/scontrol; sed -i /watchdog/d {folder}/events.jsonl")
        code = f"{folder}/code"
        program = f"{code}/python.sh '' {code}/slurmddp.zip watchdog {folder} {run.job_id} ''"
        other.sh("login", f"PATH=~/gone:$PATH bash {program}")
        assert watchdog(run, "alerted")["state"] == "FAILED"
        assert inbox.kinds() == ["failed"], "the same end is told of once"
        inbox.close()


def test_a_lost_batch_host_is_told_of(fresh_cluster: Cluster, alice: Alice, inbox: Inbox) -> None:
    run = submit(alice, inbox, recovery={"requeue": "never", "preflight": False})
    node = run.wait_for_event("job_started")["node"]
    fresh_cluster.kill_host(node)
    watchdog(run, "alerted", timeout=120)
    run.wait_for_event("alert", lambda row: row["delivered"])
    (found,) = [request.json() for request in inbox.received]
    assert (found["kind"], found["state"], found["node"]) == ("failed", "NODE_FAIL", node)
