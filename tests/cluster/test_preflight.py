"""Before the first step, and after an attempt's end: on real nodes, in real containers."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from slurmddp.records.preflight import read

from . import debian
from .cluster import Cluster
from .runs import ONE_RANK_A_NODE, Alice, Run

pytestmark = pytest.mark.cluster

#: A script that leaves behind what it can: a daemon of its own session on each node, and shared memory that it maps.
LEAVES = """
import mmap, os, subprocess, sys, time
code = '''
import mmap, os, time
name = "/dev/shm/psm_" + os.environ["SLURMDDP_NODE"] + "_" + os.environ["SLURM_JOB_ID"]
with open(name, "w+b") as file:
    file.truncate(4096)
    memory = mmap.mmap(file.fileno(), 4096)
time.sleep(3600)
'''
if os.environ["LOCAL_RANK"] == "0":
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.DEVNULL,
                     stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    while not os.path.exists("/dev/shm/psm_" + os.environ["SLURMDDP_NODE"] + "_" + os.environ["SLURM_JOB_ID"]):
        time.sleep(0.1)
print("left", flush=True)
time.sleep(float(sys.argv[1]))
"""
TINY = ("--set", "resources.cpus_per_node=1", "--set", "resources.mem_per_node=500M", "--set", "recovery.requeue=never")


@pytest.fixture(scope="module")
def alice(cluster: Cluster, torch_image: str) -> Alice:
    cluster.write("/home/alice/scripts/leaves.py", LEAVES)
    return Alice(cluster, torch_image)


def submit_script(alice: Alice, seconds: int, nodes: int | str, *more: str) -> Run:
    return alice.submit(
        "scripts/leaves.py", "--site", "testcluster", "--image", alice.image, "--time", "10m",
        "--set", f"resources.nodes={nodes}", "--set", "resources.ranks_per_node=1", *TINY, *more, "--", str(seconds),
    )  # fmt: skip


def lines(run: Run, name: str, attempt: int = 0) -> list[str]:
    path = run.folder / "logs" / f"attempt-{attempt:03d}" / name
    return path.read_text().splitlines() if path.exists() else []


def verdict(run: Run) -> list[str]:
    """Without its warnings."""
    found = read(json.loads("\n".join(lines(run, "preflight/verdict.json")) or '{"nodes": {}}'))
    return [line for line in found.lines() if line.split()[1] != "warn"]


@pytest.fixture(scope="module")
def beside(alice: Alice) -> Iterator[Run]:
    """Another run of hers that goes on meanwhile, on the same nodes."""
    run = submit_script(alice, 3600, 3)
    deadline_for_start(run, 3)
    yield run
    alice.cluster.run("login", ["scancel", run.job_id])
    alice.cluster.wait_for(lambda: not run.processes(), "nothing is left of it", 60)


def deadline_for_start(run: Run, nodes: int) -> None:
    names = [f"node{number}" for number in range(1, nodes + 1)]
    run.cluster.wait_for(
        lambda: all(any("left" in line for line in lines(run, f"{name}.log")) for name in names), "it runs", 120
    )


def daemons(run: Run) -> list[str]:
    return [node for node, _, command in run.processes() if "/dev/shm/psm_" in command]


def segments(run: Run) -> list[str]:
    found = []
    for node in run.cluster.nodes:
        done = run.cluster.sh(node, f"ls /dev/shm | grep psm_.*_{run.job_id} || true", user="root")
        found += done.stdout.split()
    return found


def test_what_a_run_leaves_is_swept_and_named_and_nothing_else(alice: Alice, beside: Run) -> None:
    """Its agents end well; what its ranks started in sessions of their own is no child of anybody's."""
    run = submit_script(alice, 3, 3)
    run.wait("done", timeout=180)
    assert verdict(run) == ["node1 ok", "node2 ok", "node3 ok"]
    for node in ("node1", "node2", "node3"):
        swept = lines(run, f"sweep/{node}")
        assert [line.split()[0] for line in swept] == ["process", "segment"], swept
        assert swept[1] == f"segment psm_{node}_{run.job_id}"
    assert daemons(run) == segments(run) == []
    alice.cluster.wait_for(lambda: not run.processes(), f"nothing is left: {run.processes()}", 10)
    assert daemons(beside) == ["node1", "node2", "node3"] and len(segments(beside)) == 3


def agent_of(run: Run, node: str) -> int:
    found = [pid for at, pid, command in run.processes() if at == node and " -m slurmddp.runtime.agent" in command]
    assert len(found) == 1, run.processes()
    return found[0]


def test_ranks_end_with_their_agent_and_the_container_with_its_parent(alice: Alice) -> None:
    """A script has no watch of its own. Its agent is killed, then what holds the container of the next attempt."""
    run = submit_script(alice, 3600, 2)
    deadline_for_start(run, 2)
    agent = agent_of(run, "node2")
    rank = min(pid for node, pid, _ in run.processes("LOCAL_RANK=0") if node == "node2")  # its daemon is younger
    gone = "for i in $(seq 100); do kill -0 {} 2>/dev/null || exit 0; sleep 0.05; done; exit 1"
    alice.cluster.sh("node2", f"kill -KILL {agent}; {gone.format(rank)}", user="root")
    run.wait_for_event("attempt_started", lambda row: row["attempt"] == 1)
    assert any(line.endswith(" python3") for line in lines(run, "sweep/node2")), "the daemon"
    alice.cluster.wait_for(lambda: "left" in lines(run, "node2.log", 1), "it runs again", 120)

    agent = agent_of(run, "node2")
    parent = alice.cluster.sh("node2", f"ps -o ppid= -p {agent}", user="root").stdout.strip()
    find = f"pgrep -P $(pgrep -P {parent} -f 'slurmddp: mounts') squashfuse"
    mount = alice.cluster.sh("node2", find, user="root").stdout.strip()
    alice.cluster.sh("node2", f"kill -KILL {parent}; {gone.format(agent)}", user="root")
    alice.cluster.sh("node2", gone.format(mount), user="root")
    run.wait_for_event("attempt_ended", lambda row: row["attempt"] == 1)
    run.wait_for_event("cleaned", lambda row: row["attempt"] == 1)
    alice.cluster.run("login", ["scancel", run.job_id])
    alice.cluster.wait_for(lambda: not run.processes(), f"no process is left: {run.processes()}", 60)


@pytest.fixture
def broken_container(alice: Alice) -> Iterator[str]:
    """On node2 the container's runtime does not work."""
    program = "#!/bin/sh\necho 'FATAL:   could not use fuse: permission \"denied\"' >&2\nexit 255\n"
    script = f"cat >/usr/local/bin/apptainer <<'END'\n{program}END\nchmod 755 /usr/local/bin/apptainer"
    alice.cluster.sh("node2", script, user="root")
    yield "node2"
    alice.cluster.sh("node2", "rm /usr/local/bin/apptainer", user="root")


def test_a_broken_node_is_named_before_anything_starts(alice: Alice, broken_container: str) -> None:
    run = submit_script(alice, 3, 3)
    event = run.wait_for_event("preflight")
    assert event["bad"] == "node2" and event["seconds"] < 60
    assert verdict(run)[1] == (
        'node2 bad cannot start python3: FATAL: could not use fuse: permission "denied" - see its log'
    )
    assert verdict(run)[::2] == ["node1 ok", "node3 ok"]
    run.wait("failed", "requeued", timeout=120)
    assert not [row for row in run.lines("events.jsonl") if row["event"] == "attempt_started"]
    assert not [line for node in alice.cluster.nodes for line in lines(run, f"{node}.log")]
    alice.cluster.run("login", ["scancel", run.job_id], check=False)


@pytest.fixture
def on_two_nodes(alice: Alice) -> Iterator[str]:
    """A folder that node2 lacks."""
    for node in ("login", "node1", "node3"):
        alice.cluster.sh(node, "mkdir /srv/books", user="root")
    yield "/srv/books"
    for node in ("login", "node1", "node3"):
        alice.cluster.sh(node, "rmdir /srv/books", user="root")


def test_a_bind_that_one_node_lacks_is_named_before_anything_starts(alice: Alice, on_two_nodes: str) -> None:
    run = submit_script(alice, 3, 3, "--set", f"container.binds=[{on_two_nodes}]")
    event = run.wait_for_event("preflight")
    assert event["bad"] == "node2"
    run.wait("failed", "requeued", timeout=120)
    excluded = [row for row in run.lines("events.jsonl") if row["event"] == "node_excluded"]
    assert [row["excluded"] for row in excluded] == ["node2"]
    assert (
        "cannot bind /srv/books (No such file or directory) - mount or create it on this node" in excluded[0]["reason"]
    )
    assert not [row for row in run.lines("events.jsonl") if row["event"] == "attempt_started"]
    alice.cluster.run("login", ["scancel", run.job_id], check=False)


def test_what_fails_on_some_nodes_costs_these_and_what_fails_on_all_the_run(alice: Alice) -> None:
    """A setup line, and a Python that the image does not have: the run with one node waits for no other one."""
    setup = "setup=['[[ $SLURMD_NODENAME != node2 ]]']"
    some = submit_script(alice, 0, "{min: 2, max: 3}", "--set", setup)
    everywhere = submit_script(alice, 0, 1, "--set", "container.python=python9")
    some.wait("done")
    (excluded,) = [row for row in some.lines("events.jsonl") if row["event"] == "node_excluded"]
    assert excluded["excluded"] == "node2"
    assert excluded["reason"] == "preflight: setup line failed with exit code 1: [[ $SLURMD_NODENAME != node2 ]]"
    everywhere.wait("failed")
    rows = everywhere.lines("events.jsonl")
    assert not [row for row in rows if row["event"] in ("requeued", "attempt_started")]
    assert "container.python: there is no python9 in the image" in everywhere.status()[1]["cause"]


@pytest.mark.long
def test_without_a_preflight_what_fails_on_all_nodes_at_different_times_costs_one_attempt(alice: Alice) -> None:
    setup = "setup=['[[ $SLURMD_NODENAME == node1 ]] || sleep 6', exit 3]"
    run = submit_script(alice, 0, 2, "--set", setup, "--set", "recovery.preflight=false")
    run.wait("failed")
    rows = run.lines("events.jsonl")
    assert not [row for row in rows if row["event"] == "node_excluded"]
    assert [row["cause"] for row in rows if row["event"] == "attempt_ended"] == [
        "setup line exited with code 3: exit 3"
    ]


@pytest.mark.parametrize("option", [pytest.param("--contain", marks=pytest.mark.long), "--containall"])
def test_a_contained_container_trains(alice: Alice, option: str) -> None:
    """With a /dev, /tmp and home of its own, and with process ids of its own."""
    container = {"image": alice.image, "options": [option]}
    run = alice.submit(
        alice.job_file(f"own{option[1:]}", resources=ONE_RANK_A_NODE, container=container, train={"steps": 10})
    )
    run.wait("done")
    assert [line.split()[1] for line in verdict(run)] == ["ok", "ok"]
    assert max(row["step"] for row in run.metrics()) == 10
    alice.cluster.wait_for(lambda: not run.processes(), f"nothing is left: {run.processes()}", 10)


def test_of_two_nodes_that_do_not_reach_each_other_one_is_excluded(alice: Alice, fresh_cluster: Cluster) -> None:
    """The head and Slurm reach both. All three together could not train: ranks connect to every other rank."""
    fresh_cluster.part("node2", "node3")
    small = {**ONE_RANK_A_NODE, "nodes": {"min": 2, "max": 3}}
    run = alice.submit(alice.job_file("apart", resources=small, train={"steps": 10}))
    run.wait("done")
    rows = run.lines("events.jsonl")
    (excluded,) = (row for row in rows if row["event"] == "node_excluded")
    assert excluded["excluded"] == "node3"
    assert excluded["reason"].startswith("preflight: node2 cannot connect to node3 at 10.77.0."), excluded["reason"]
    (started,) = (row for row in rows if row["event"] == "attempt_started")
    assert started["nodes"].split() == ["node1", "node2"]


@pytest.fixture
def little_shared_memory(alice: Alice) -> Iterator[str]:
    """A node with the /dev/shm of a careless container."""
    alice.cluster.sh("node2", "mount -o remount,size=32M /dev/shm", user="root")
    yield "node2"
    alice.cluster.sh("node2", "mount -o remount,size=50% /dev/shm", user="root")


def test_the_spare_replaces_a_bad_node_and_the_next_job_avoids_it(alice: Alice, little_shared_memory: str) -> None:
    bad = little_shared_memory
    site = {"name": "remembers", "title": "t", "bases": ["testcluster"], "exclude_bad_nodes_for": "1h"}
    alice.cluster.write("/home/alice/.config/slurmddp/sites/remembers.yaml", yaml.safe_dump(site))
    three = {**ONE_RANK_A_NODE, "nodes": {"min": 2, "max": 2, "spares": 1}}
    train = {"steps": 10, "workers": 1}
    run = alice.submit(alice.job_file("shm", site="remembers", resources=three, train=train))
    run.wait_for_event("attempt_started", timeout=240)
    alice.cluster.run("login", ["scancel", run.job_id])
    rows = run.lines("events.jsonl")
    (excluded,) = (row for row in rows if row["event"] == "node_excluded")
    assert excluded["excluded"] == bad
    assert excluded["reason"].startswith("preflight: /dev/shm has only 32 MiB free - "), excluded
    (started,) = (row for row in rows if row["event"] == "attempt_started")
    assert started["nodes"].split() == ["node1", "node3"]
    assert next(row for row in rows if row["event"] == "preflight")["checked"] == 3

    (known,) = json.loads(alice.command("site", "bad-nodes", "--site", "remembers", "--json").stdout)
    assert (known["node"], known["run"], known["reason"]) == (bad, run.id, excluded["reason"])
    again = alice.submit(
        alice.job_file("again", site="remembers", resources={**ONE_RANK_A_NODE, "nodes": 2}, train=train)
    )
    assert any(f"node {bad} is excluded: preflight: /dev/shm" in line for line in again.answer["warnings"])
    assert alice.cluster.job(again.job_id)["ExcNodeList"] == bad
    alice.cluster.run("login", ["scancel", again.job_id])


#: Fault -> commands that make it on a node and take it away again, and the reason. RUN: the run folder.
FAULTS = {
    "no dataset": ("mount -t tmpfs none /home/alice/text", "umount /home/alice/text", "train.data.path: "),
    "other code": (
        "cp -r RUN/code /tmp/code && echo >>/tmp/code/python.sh && mount --bind /tmp/code RUN/code",
        "umount RUN/code && rm -r /tmp/code",
        "sees other code in the run folder",
    ),
    "read-only": (
        "mount --bind RUN RUN && mount -o remount,bind,ro RUN",
        "umount RUN",
        "Slurm could not start a process there: ",
    ),
    "wrong interface": (
        "ip link set ib0 down; ip link set ib0 name ib9; ip link set ib9 up",
        "ip link set ib9 down; ip link set ib9 name ib0; ip link set ib0 up",
        "has no interface ib0 with an IPv4 address; it has: lo ib9",
    ),
    "link down": (
        "ip link set ib1 down",
        "ip link set ib1 up",
        "has no interface ib1 with an IPv4 address; it has: lo ib0",
    ),
    # Ports of runs; Slurm's own are the kernel's, below.
    "blocked port": (
        "ip rule add to 10.77.0.0/24 ipproto tcp dport 61000-65534 blackhole",
        "ip rule delete to 10.77.0.0/24 ipproto tcp dport 61000-65534 blackhole",
        "cannot reach the head node1 on the rendezvous port ",
    ),
}


@pytest.fixture
def fault(request: pytest.FixtureRequest, fresh_cluster: Cluster) -> Iterator[str]:
    """A key of FAULTS. For "link down", each node has ib1, in a network of its own."""
    nodes = ("node1", "node2", "node3") if request.param == "link down" else ()
    for number, node in enumerate(nodes, start=1):
        make = f"ip link add link ib0 name ib1 type macvlan mode bridge && ip address add 10.78.0.{number}/24 dev ib1"
        fresh_cluster.sh(node, f"{make} && ip link set ib1 up", user="root")
    yield request.param
    for node in nodes:
        fresh_cluster.sh(node, "ip link delete ib1", user="root")


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS, indirect=True)
def test_a_fault_of_one_node_is_named_and_the_spare_trains(alice: Alice, fresh_cluster: Cluster, fault: str) -> None:
    make, take_away, reason = FAULTS[fault]
    network = {"network": {"interface": "ib1"}} if fault == "link down" else {}
    small = {**ONE_RANK_A_NODE, "sbatch_extra": ["--hold"]}
    small["nodes"] = {"min": 2, "max": 2, "spares": 1}
    run = alice.submit(alice.job_file("fault", resources=small, train={"steps": 10}, **network))
    fresh_cluster.sh("node2", make.replace("RUN", run.answer["run_folder"]), user="root")
    try:
        fresh_cluster.run("login", ["scontrol", "release", run.job_id])
        run.wait_for_event("attempt_started", timeout=240)
    finally:
        fresh_cluster.run("login", ["scancel", run.job_id], check=False)
        fresh_cluster.wait_for(lambda: not run.processes(), "nothing is left of it", 60)
        fresh_cluster.sh("node2", take_away.replace("RUN", run.answer["run_folder"]), user="root")
    rows = run.lines("events.jsonl")
    (excluded,) = (row for row in rows if row["event"] == "node_excluded")
    assert excluded["excluded"] == "node2" and excluded["reason"].startswith(f"preflight: {reason}"), excluded
    (started,) = (row for row in rows if row["event"] == "attempt_started")
    assert started["nodes"].split() == ["node1", "node3"]


@pytest.mark.long
def test_a_low_limit_of_locked_memory_is_named(alice: Alice, fresh_cluster: Cluster) -> None:
    """Only where NCCL may use RDMA: node2 shows an adapter like the kernel. The job wants GPUs, which no node has."""
    own = {"gpu_vendor": "nvidia", "gpu_request": "gres", "partitions": {"main": {"gpus_per_node": 1}}}
    site = {"name": "gpus", "title": "t", "bases": ["testcluster"], **own}
    alice.cluster.write("/home/alice/.config/slurmddp/sites/gpus.yaml", yaml.safe_dump(site))
    adapter = (
        "mkdir -p /tmp/class/infiniband/mlx5_0; cp -a /sys/class/net /tmp/class && mount --bind /tmp/class /sys/class"
    )
    fresh_cluster.sh("node2", adapter, user="root")
    limit = "[[ $SLURMD_NODENAME != node2 ]] || ulimit -l 64"
    resources = {**ONE_RANK_A_NODE, "gpus_per_node": 1, "nodes": 2}
    run = alice.submit(alice.job_file("memlock", site="gpus", resources=resources, setup=[limit]))
    run.wait("failed")
    fresh_cluster.sh("node2", "umount /sys/class && rm -r /tmp/class", user="root")
    first, second = verdict(run)
    assert "may lock only" not in first
    assert "may lock only 64 KiB of memory (ulimit -l), and NCCL needs more for RDMA - ask" in second


@pytest.mark.long
def test_a_clock_that_is_wrong_is_a_warning_that_status_shows(alice: Alice) -> None:
    """The library is that of this machine: it must run in the image, too, which is Debian 12."""
    debian.ensure_tools({"faketime": "faketime"})
    library = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
    shutil.copyfile(library, alice.cluster.machine_path("/home/alice/libfaketime.so.1"))
    ahead = "LD_PRELOAD=/home/alice/libfaketime.so.1 FAKETIME=+90 FAKETIME_DONT_FAKE_MONOTONIC=1"
    exports = " ".join(f"APPTAINERENV_{word}" for word in ahead.split())
    run = submit_script(alice, 0, 3, "--set", f"setup=['[[ $SLURMD_NODENAME != node2 ]] || export {exports}']")
    (warning,) = run.wait_for_event("preflight", timeout=240)["warnings"]
    alice.cluster.run("login", ["scancel", run.job_id], check=False)
    assert warning.startswith("node2: its clock is 90 s ahead of the others' - ask"), warning
    assert run.status()[1]["warnings"] == [warning]


LOST = "node2"


def submit_and_lose_node(alice: Alice, nodes: int | str, *more: str) -> Run:
    """LOST is idle to Slurm when the job starts, and cannot be reached.

    The job is held until slurmd is dead: it must not start before.
    """
    run = submit_script(alice, 0, nodes, "--set", "resources.sbatch_extra=[--hold]", *more)
    for pid in alice.cluster.daemons(LOST, "slurmd"):
        alice.cluster.run(LOST, ["kill", "-KILL", str(pid)], user="root")
    alice.cluster.run("login", ["scontrol", "release", run.job_id])
    return run


@pytest.fixture
def slurmd_back(fresh_cluster: Cluster) -> Iterator[None]:
    yield
    if not fresh_cluster.daemons(LOST, "slurmd"):
        start_slurmd(fresh_cluster, LOST)


@pytest.fixture
def unnoticed(fresh_cluster: Cluster) -> Iterator[None]:
    """The controller does not notice, which would end the job: the preflight may ask for longer than it waits."""
    dead_after(fresh_cluster, 300)
    yield
    dead_after(fresh_cluster, 15)


def dead_after(cluster: Cluster, seconds: int) -> None:
    """A slurmd that has not answered for so long makes its node DOWN.

    slurmctld reads this at its start: `scontrol reconfigure` would ask every slurmd as well, and wait for a dead one.
    """
    path = cluster.layout.shared / "slurm/slurm.conf"
    path.write_text(re.sub("^SlurmdTimeout=.*", f"SlurmdTimeout={seconds}", path.read_text(), flags=re.MULTILINE))
    cluster.restart_controller()
    cluster.wait_nodes(timeout=180)


def start_slurmd(cluster: Cluster, node: str) -> None:
    cluster.run(node, ["slurmd", "-N", node], user="root")


@pytest.mark.long
def test_a_node_that_slurm_cannot_reach_is_named_and_no_other(alice: Alice, unnoticed: None, slurmd_back: None) -> None:
    """srun ends what it has started on the others, which then have not answered."""
    run = submit_and_lose_node(alice, 3)
    run.wait_for_event("job_ended")
    (excluded,) = (row for row in run.lines("events.jsonl") if row["event"] == "node_excluded")
    assert excluded["excluded"] == LOST
    assert excluded["reason"].startswith("preflight: Slurm could not start a process there: ")


@pytest.mark.long
def test_a_node_whose_slurmd_is_back_in_a_moment_is_used(alice: Alice, unnoticed: None, slurmd_back: None) -> None:
    run = submit_and_lose_node(alice, 3)
    log, asked_again = run.folder / "logs/job.log", f"Slurm could not start the preflight on {LOST}: "
    alice.cluster.wait_for(lambda: log.exists() and asked_again in log.read_text(), "it is asked again", 60)
    start_slurmd(alice.cluster, LOST)
    run.wait("done")
    assert not [row for row in run.lines("events.jsonl") if row["event"] == "node_excluded"]
    assert {line.split()[0] for line in verdict(run)} == set(alice.cluster.nodes)


@pytest.mark.long
def test_without_a_preflight_the_next_attempt_is_made_without_that_node(alice: Alice, slurmd_back: None) -> None:
    run = submit_and_lose_node(alice, "{min: 2, max: 2, spares: 1}", "--set", "recovery.preflight=false")
    run.wait("done")
    rows = run.lines("events.jsonl")
    first, again = (row["nodes"].split() for row in rows if row["event"] == "attempt_started")
    assert LOST in first and LOST not in again and len(again) == 2
    ended = next(row for row in rows if row["event"] == "attempt_ended")
    assert ended["node"] == LOST
    assert ended["cause"].startswith("Slurm could not start the ranks there: ")
