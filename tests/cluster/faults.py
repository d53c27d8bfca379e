"""Faults: what is done to a run on the test cluster, at a moment of chance, and where it was done.

Each fault is a function of the cluster, the run and a source of chance; it returns once the harm is done (and, where it
lasts a while, over). What it broke of the cluster itself, the scenario's owner mends: Cluster.reset.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmddp.shared.checkpoint import layout
from slurmddp.shared.checkpoint.checkpoints import Checkpoints
from tests.checkpoints import flip

from .cluster import Cluster
from .runs import Run

#: Steps of the run between which a fault happens.
FIRST_STEP, LAST_STEP = 7, 60
#: Steps between two faults of one run, with a checkpoint among them, beyond the farthest step before.
SETTLED = 6
#: A host that lost its power comes back after at most so many seconds, where a fault says so.
LONGEST_OUTAGE = 60
#: What a step takes at most on an idle machine; a fault happens at any moment of one.
PACE = 0.1
#: Seconds that a job's start may take on a machine that is busy with other things.
START = 240
BALLAST = "/scratch/ballast"
#: A checkpoint is saved at least so often, in seconds; where nothing can be written, nothing tells of its failure.
SAVING = 4
RECEIVER = "/opt/slurmddp/tests/receiver.py"
#: The port of the receiver that a fault stops.
DEAF = 8081


@dataclass(frozen=True)
class Injected:
    """What was done: when (unix seconds), to which node and rank (None: the fault has none), behind which step."""

    time: float
    step: int
    node: str | None = None
    rank: int | None = None


Fault = Callable[[Cluster, Run, random.Random], Injected]


def step_of(run: Run) -> int:
    """The newest step that the metrics tell of."""
    rows = run.metrics()
    return int(rows[-1]["step"]) if rows else 0


def moment(run: Run, chance: random.Random) -> None:
    """Wait for a moment of chance in the midst of the run."""
    wait_for_step(run, chance.randint(FIRST_STEP, LAST_STEP))
    time.sleep(chance.uniform(0, PACE))


def wait_for_step(run: Run, step: int) -> None:
    """Wait for a step, and notice it at once: a look at the job takes longer than several steps."""
    deadline = time.monotonic() + START
    while step_of(run) < step:
        assert time.monotonic() < deadline, f"step {step} was not reached\n{run.logs()}"
        time.sleep(0.02)


def now(run: Run, node: str | None = None, rank: int | None = None) -> Injected:
    return Injected(time.time(), step_of(run), node, rank)


def nodes_of(cluster: Cluster, run: Run) -> list[str]:
    """The nodes that the job has; the first is the batch host."""
    listed = cluster.job(run.job_id)["NodeList"]
    return cluster.run("login", ["scontrol", "show", "hostnames", listed]).stdout.split()


def training_nodes(run: Run) -> list[str]:
    """The nodes with an agent, in their order."""
    return sorted({node for node, _, _ in agents(run)})


def others(cluster: Cluster, run: Run) -> list[str]:
    """The nodes that train, without the supervisor's."""
    found = [node for node in training_nodes(run) if node != leader_of(run)]
    assert found, f"the job trains on its supervisor's node alone: {cluster.job(run.job_id)}"
    return found


def other_at_a_moment(cluster: Cluster, run: Run, chance: random.Random) -> str:
    """A node of chance that trains, without the supervisor; returns at a moment of chance."""
    wait_for_step(run, 1)
    node = chance.choice(others(cluster, run))
    moment(run, chance)
    return node


def agents(run: Run) -> list[tuple[str, int, str]]:
    """(node, pid, command line) of the torchrun agents."""
    return [each for each in run.processes() if "slurmddp.runtime.agent" in each[2] and "srun" not in each[2]]


def process_of(run: Run, rank: int) -> tuple[str, int]:
    """Node and pid of a rank's own process."""
    found = [(node, pid) for node, pid, command in run.processes(f"RANK={rank}") if "slurmddp.runtime.train" in command]
    assert found, f"rank {rank} has no process"
    return min(found)  # its children, were there any, came later


def signal_rank(signal: str) -> Fault:
    """Send a signal to a rank of chance, on whichever node it is."""

    def fault(cluster: Cluster, run: Run, chance: random.Random) -> Injected:
        rank = chance.randrange(world_of(run))
        node, pid = process_of(run, rank)
        moment(run, chance)
        done = now(run, node, rank)
        cluster.run(node, ["kill", f"-{signal}", str(pid)], user="root")
        return done

    return fault


def world_of(run: Run) -> int:
    """Ranks of the newest start."""
    wait_for_step(run, 1)
    return int([row for row in run.lines("events.jsonl") if row["event"] == "started"][-1]["world"])


def kill_agent(cluster: Cluster, run: Run, chance: random.Random) -> Injected:
    """SIGKILL one node's torchrun."""
    wait_for_step(run, 1)
    node, pid, _ = chance.choice(agents(run))
    moment(run, chance)
    done = now(run, node)
    cluster.run(node, ["kill", "-KILL", str(pid)], user="root")
    return done


def raise_in_rank(cluster: Cluster, run: Run, chance: random.Random) -> Injected:
    """An exception in the task of one rank (faulty.py)."""
    rank = chance.randrange(world_of(run))
    node, _ = process_of(run, rank)
    moment(run, chance)
    done = now(run, node, rank)
    cluster.write(f"{run.answer['run_folder']}/raise.new", str(rank))
    (run.folder / "raise.new").rename(run.folder / "raise")
    return done


def fill_disk(cluster: Cluster, run: Run, chance: random.Random) -> Injected:
    """The file system of the run folder, which has to be in /scratch, is full until a checkpoint could not be saved.

    At times to the last byte, and at times small files still find room.
    """
    moment(run, chance)
    done = now(run)
    room = chance.choice([0, 1 << 18])
    ballast = cluster.machine_path(BALLAST)
    try:
        # Without room for a line, the failed save is never told.
        deadline = time.monotonic() + (SAVING if room == 0 else START)
        with ballast.open("wb", buffering=0) as file:
            while time.monotonic() < deadline and not failed_saves(run):
                free = shutil.disk_usage(ballast.parent).free
                with contextlib.suppress(OSError):  # again and again: older checkpoints are pruned
                    file.write(bytes(max(0, free - room)))
                time.sleep(0.1)
        assert room == 0 or failed_saves(run), "a checkpoint found room"
    finally:
        ballast.unlink()
    return done


def failed_saves(run: Run) -> list[dict[str, Any]]:
    return [row for row in run.lines("events.jsonl") if row["event"] == "checkpoint_failed"]


def newest_checkpoint(run: Run) -> Path:
    """The folder of the newest one that is complete."""
    complete = [path for _, path in Checkpoints(run.folder / "checkpoints").folders() if layout.is_complete(path)]
    return max(complete)


def flip_and_kill(cluster: Cluster, run: Run, chance: random.Random) -> Injected:
    """A bit of the newest checkpoint changes, and before there is a newer one a rank dies."""
    rank = chance.randrange(world_of(run))
    node, pid = process_of(run, rank)
    moment(run, chance)
    before = newest_checkpoint(run)
    while newest_checkpoint(run) == before:
        time.sleep(0.01)
    done = now(run, node, rank)
    cluster.run(node, ["kill", "-STOP", str(pid)], user="root")  # no step and no save begins any more
    time.sleep(1)  # for a save of the others that is under way
    flip(max(newest_checkpoint(run).glob("*.distcp"), key=lambda path: path.stat().st_size))
    cluster.run(node, ["kill", "-KILL", str(pid)], user="root")
    return done


def cut_network(cluster: Cluster, run: Run, chance: random.Random) -> Injected:
    """Pull the cable of a node that trains, without the supervisor. It stays out."""
    node = other_at_a_moment(cluster, run, chance)
    done = now(run, node)
    cluster.cut_network(node)
    return done


def lose_node(cluster: Cluster, run: Run, chance: random.Random) -> Injected:
    """A power cut on a node that trains, without the supervisor."""
    node = other_at_a_moment(cluster, run, chance)
    done = now(run, node)
    cluster.kill_host(node)
    return done


def leader_of(run: Run) -> str:
    """The node of the supervisor: with recovery.standby, it need not be that of job.sh."""
    started = [row["node"] for row in run.lines("events.jsonl") if row["event"] in ("job_started", "attempt_started")]
    return str(started[-1])


def lose_batch_host(cluster: Cluster, run: Run, chance: random.Random) -> Injected:
    """A power cut on the node where the supervisor runs."""
    moment(run, chance)
    node = leader_of(run)
    done = now(run, node)
    cluster.kill_host(node)
    return done


def lose_two(cluster: Cluster, run: Run, chance: random.Random) -> Injected:
    """A power cut on the node where the supervisor runs, and at once on another one that trains."""
    node = other_at_a_moment(cluster, run, chance)
    done = now(run)
    cluster.kill_host(leader_of(run))
    cluster.kill_host(node)
    return done


def lose_spare(cluster: Cluster, run: Run, chance: random.Random) -> Injected:
    """A power cut on the node that waits."""
    wait_for_step(run, 1)
    (node,) = {*nodes_of(cluster, run)} - {*training_nodes(run)}
    moment(run, chance)
    done = now(run, node)
    cluster.kill_host(node)
    run.wait_for_event("node_excluded", lambda row: row["excluded"] == node)
    return done


def lose_starting_node(cluster: Cluster, run: Run, chance: random.Random) -> Injected:
    """A power cut on a node without the supervisor, before the first step."""
    started = run.wait_for_event("attempt_started", timeout=START)
    node = next(each for each in started["nodes"].split() if each != started["node"])
    time.sleep(chance.uniform(0, 3))
    done = now(run, node)
    cluster.kill_host(node)
    return done


def flap_network(cluster: Cluster, run: Run, chance: random.Random) -> Injected:
    """The cable of a node that trains comes out and in again, several times."""
    node = other_at_a_moment(cluster, run, chance)
    done = now(run)
    for _ in range(4):
        cluster.cut_network(node)
        time.sleep(chance.uniform(0.2, 4))
        cluster.mend_network(node)
        time.sleep(chance.uniform(0.2, 2))
    return done


def supervisors(cluster: Cluster, node: str) -> list[int]:
    """The supervisor of a node, and the process that writes for it."""
    ours = [pid for pid, argv in cluster.processes(node) if "job" in argv and any("slurmddp.zip" in w for w in argv)]
    assert len(ours) > 1
    return ours


def freeze(cluster: Cluster, node: str, signal: str) -> None:
    cluster.run(node, ["kill", f"-{signal}", *map(str, supervisors(cluster, node))], user="root")


def freeze_supervisor(cluster: Cluster, run: Run, chance: random.Random) -> Injected:
    """SIGSTOP of the supervisor, for longer than a lost node is silent."""
    moment(run, chance)
    node = leader_of(run)
    done = now(run)
    freeze(cluster, node, "STOP")
    time.sleep(chance.uniform(6, 25))
    freeze(cluster, node, "CONT")
    return done


def restart_controller(cluster: Cluster, run: Run, chance: random.Random) -> Injected:
    """slurmctld ends and comes back."""
    moment(run, chance)
    done = now(run)
    cluster.restart_controller()
    return done


def chaos(count: int) -> Fault:
    """So many faults in one run, each of chance, each once the run has got further than before the last one."""
    kinds = (
        signal_rank("KILL"), signal_rank("STOP"), kill_agent, raise_in_rank, flip_and_kill, restart_controller, requeue,
        lose_node, lose_batch_host, lose_two, flap_network, freeze_supervisor,
    )  # fmt: skip

    def fault(cluster: Cluster, run: Run, chance: random.Random) -> Injected:
        first: Injected | None = None
        for _ in range(count):
            wait_for_step(run, 1 + max((int(row["step"]) for row in run.metrics()), default=0) + SETTLED)
            done = chance.choice(kinds)(cluster, run, chance)
            print(f"{run.id}: {done}", file=sys.stderr, flush=True)
            first = first or done
            for host in cluster.nodes:
                if not cluster.host_is_up(host):
                    with slow_steps(cluster, run):
                        time.sleep(chance.uniform(0, LONGEST_OUTAGE))
                        cluster.restart_host(host)
                    resume = ["scontrol", "update", f"NodeName={host}", "State=RESUME"]
                    cluster.run("login", resume, user="root", check=False)  # an error where it needs none
        assert first is not None
        return Injected(first.time, first.step)

    return fault


def time_limit(cluster: Cluster, run: Run, chance: random.Random) -> Injected:
    """The time limit comes near: it is lowered to the shortest there is, and for the next attempt put back.

    Slurm looks at limits twice a minute; the steps are slow until it has.
    """
    moment(run, chance)
    with slow_steps(cluster, run):
        done = now(run)
        limit = cluster.job(run.job_id)["TimeLimit"]
        update = ["scontrol", "update", f"JobId={run.job_id}"]
        cluster.run("login", [*update, "TimeLimit=1"])
        run.wait_for_event("job_ended", lambda row: row["time"] > done.time, timeout=120)
        cluster.run("login", [*update, f"TimeLimit={limit}"], user="root")
    return done


@contextlib.contextmanager
def slow_steps(cluster: Cluster, run: Run) -> Iterator[None]:
    """While something takes its time, the run must not get to its end."""
    slow = f"{run.answer['run_folder']}/slow"
    cluster.write(slow, "")
    yield
    cluster.machine_path(slow).unlink()


def preempt(cluster: Cluster, run: Run, chance: random.Random) -> Injected:
    """A job of a higher partition takes the nodes for a second."""
    moment(run, chance)
    done = now(run)
    wanted = ["sbatch", "--parsable", "--partition=high", "--nodes=3", "--exclusive", "--output=/dev/null"]
    job = cluster.run("login", [*wanted, "--wrap", "sleep 1"]).stdout.strip()
    cluster.wait_job(job, timeout=90)
    return done


def requeue(cluster: Cluster, run: Run, chance: random.Random) -> Injected:
    """An operator puts the job back into the queue."""
    moment(run, chance)
    done = now(run)
    cluster.run("login", ["scontrol", "requeue", run.job_id], user="root")
    return done


def scancel(cluster: Cluster, run: Run, chance: random.Random) -> Injected:
    """The user's own scancel."""
    moment(run, chance)
    done = now(run)
    cluster.run("login", ["scancel", run.job_id])
    return done


def kill_receiver(cluster: Cluster, port: int) -> None:
    """SIGKILL the receiver of alerts on the login host that listens on this port."""
    for pid, argv in cluster.processes("login"):
        if RECEIVER in argv and argv[-1] == str(port):
            cluster.run("login", ["kill", "-KILL", str(pid)])


def stop_receiver(cluster: Cluster, run: Run, chance: random.Random) -> Injected:
    """The webhook's server is gone before the run has ended."""
    moment(run, chance)
    done = now(run)
    kill_receiver(cluster, DEAF)
    return done
