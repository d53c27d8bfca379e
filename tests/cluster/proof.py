"""What a fault must not change: samples, weights, clean nodes, a ledger that adds up, an alert that names the culprit.

And what it costs, as measured from outside: until it is noticed, until training goes on, and the steps done again.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import Any

from tests import receiver as receivers

from . import faults
from .cluster import Cluster, ClusterError
from .faults import Fault, Injected
from .runs import Alice, Run, merged, story

STEPS = 120
KINDS = ("started", "requeued", "recovered", "hang", "stopping", "failed", "finished")
WEBHOOK = "/home/alice/webhook"
#: Two nodes of one rank each (most of a start is the import of torch), with checkpoints every half second. Without the
#: preflight each start is some seconds quicker; where nodes get lost, it has to be there.
JOB: dict[str, Any] = {
    "resources": {"nodes": 2, "ranks_per_node": 1, "cpus_per_node": 1, "mem_per_node": "1500M"},
    "train": {
        "task": "faulty:create",
        "project": "/home/alice/faulty",
        "data": {"pace": faults.PACE, "dropout": 0.1},
        "batch": {"global": 12, "micro": 6},
        "steps": STEPS,
        "optimizer": {"lr": 1e-3},
        "deterministic": True,
        "log_every": 1,
    },
    "checkpoint": {"every_steps": 5},
    "timeouts": {"hang": "5s", "collective": "60s"},
    "recovery": {"preflight": False},
    "alerts": [{"to": "json", "url_file": WEBHOOK, "insecure": True, "on": list(KINDS)}],
}
#: Tells the receiver that a fault stops.
DEAF_JOB = {"alerts": [{**JOB["alerts"][0], "url_file": f"{WEBHOOK}-deaf"}]}
#: Partitions whose jobs are pushed out: at once, and half a minute after a signal.
LOW = {"resources": {"partition": "low"}}
LOW_WARNED = {"resources": {"partition": "low-warned"}}
#: As many nodes as there are: one of them waits.
SPARE = {"resources": {"nodes": {"min": 2, "max": 2, "spares": 1}}, "recovery": {"preflight": True}}
#: All of recovery.* on, too.
ALL_ON: dict[str, Any] = merged(
    SPARE, {"recovery": dict.fromkeys(("fork", "spares_warm", "heartbeats", "standby"), True)}
)
#: One node is enough to go on. Ranks draw their own dropout masks: without it, weights stay close.
FEWER = {
    "resources": {"nodes": {"min": 1, "max": 2}},
    "recovery": {"preflight": True},
    "train": {"data": {"dropout": 0.0}},
}


@dataclass(frozen=True)
class Scenario:
    """A fault, the job that it happens to, and what has to come of it.

    alert:    the kind of message that tells of the fault; None where nothing is to be told.
    says:     words of the message's cause.
    event:    an event that the fault has to leave.
    silent:   whether no alert but the first and the last may come.
    alone:    whether it breaks the cluster for others: nodes, or who may have them.
    same:     whether the run ends on as many ranks as the undisturbed one, so that the weights are equal bit for bit.
    deaf:     the fault stops the receiver of alerts, which is started again after the run.
    long:     `make test` leaves it out: another test plays the same fault, without comparing every weight.
    steps:    of the run.
    """

    name: str
    fault: Fault
    job: dict[str, Any] = field(default_factory=dict)
    ends: str = "done"
    alert: str | None = "recovered"
    says: tuple[str, ...] = ()
    event: str = "job_started"
    silent: bool = False
    alone: bool = False
    same: bool = True
    deaf: bool = False
    long: bool = False
    timeout: float = 240
    steps: int = STEPS

    @property
    def undisturbed(self) -> tuple[bool, int]:
        """Return what the run to compare with has to be like."""
        return self.same, self.steps


SCENARIOS = (
    Scenario("SIGKILL of a rank", faults.signal_rank("KILL"), says=("SIGKILL",), long=True),
    Scenario("SIGKILL of an agent", faults.kill_agent, long=True),
    Scenario("SIGSTOP of a rank", faults.signal_rank("STOP"), alert="hang", long=True),
    Scenario("exception in a rank", faults.raise_in_rank, says=("told to fail by the file raise",), long=True),
    Scenario("full disk during a save", faults.fill_disk, {"paths": {"runs": "/scratch/runs"}}, alert=None),
    Scenario(
        "flipped bit, then SIGKILL", faults.flip_and_kill, says=("SIGKILL",), event="checkpoint_rejected", long=True
    ),
    Scenario("webhook server down", faults.stop_receiver, DEAF_JOB, alert=None, deaf=True),
    Scenario("slurmctld restarted", faults.restart_controller, alert=None, silent=True),
    Scenario("requeue by an operator", faults.requeue, alert="requeued", long=True),
    Scenario("scancel", faults.scancel, ends="cancelled", alert="stopping", long=True),
    Scenario("time limit", faults.time_limit, {"timeouts": {"stop": "20s"}}, alert="requeued", long=True),
    Scenario("preemption, without warning", faults.preempt, LOW, alert="requeued", alone=True, long=True),
    Scenario("preemption, with warning", faults.preempt, LOW_WARNED, alert="requeued", alone=True, long=True),
    Scenario("node lost, with a spare", faults.lose_node, SPARE, alone=True, long=True),
    Scenario(
        "network of a node cut, fewer nodes continue", faults.cut_network, FEWER, alone=True, same=False, long=True
    ),
    Scenario("batch host lost", faults.lose_batch_host, SPARE, alert="requeued", alone=True, long=True, timeout=300),
    Scenario("batch host lost, with a standby", faults.lose_batch_host, ALL_ON, alone=True, long=True, timeout=300),
    Scenario(
        "batch host and another node lost at once, with a standby", faults.lose_two,
        merged(ALL_ON, FEWER),
        alert=None, alone=True, same=False, long=True, timeout=400,
    ),
    Scenario("supervisor frozen, then awake", faults.freeze_supervisor, ALL_ON, alert=None, alone=True, long=True),
    Scenario(
        "spare lost while it waits", faults.lose_spare, ALL_ON, alert=None, event="node_excluded", alone=True, long=True
    ),
    Scenario("network of a node flaps", faults.flap_network, ALL_ON, alert=None, alone=True, long=True),
    Scenario(
        "node lost while ranks start", faults.lose_starting_node, ALL_ON, alert=None, event="node_excluded", alone=True,
        long=True,
    ),
)  # fmt: skip


def chaos(count: int) -> Scenario:
    """So many faults in one run, among them lost nodes, which come back."""
    job = merged(ALL_ON, {"resources": {"time": f"{15 + 4 * count}m"}})
    steps = STEPS + 30 * count
    return Scenario(
        f"chaos of {count} faults", faults.chaos(count), job, alert=None, alone=True, timeout=600, steps=steps
    )


class Receiver:
    """A webhook's server on the login host, which all nodes reach."""

    def __init__(self, cluster: Cluster, port: int) -> None:
        self.cluster, self.port = cluster, port
        self.folder = f"/home/alice/received-{port}"
        self.start()

    @property
    def url(self) -> str:
        return f"http://login:{self.port}/services/T0SECRET/B1SECRETB1SECRETB1"

    def start(self) -> None:
        """Start it, again too: what it has received before stays."""
        listens = self.cluster.machine_path(self.folder) / "port"
        listens.unlink(missing_ok=True)
        script = ["python3", faults.RECEIVER, self.folder, "--port", str(self.port)]
        self._process = self.cluster.popen("login", script)
        self.cluster.wait_for(listens.exists, "the receiver listens", 10)

    def stop(self) -> None:
        """As by a crash."""
        faults.kill_receiver(self.cluster, self.port)
        self._process.wait(10)

    def alerts(self, run: Run) -> list[dict[str, Any]]:
        """The messages about a run that were taken, in their order."""
        taken = receivers.recorded(self.cluster.machine_path(self.folder))
        return [body for each in taken if each.answer == 200 and (body := each.json())["run"] == run.id]


@dataclass
class Bench:
    """What all scenarios of a session share: the user, the receiver, and the undisturbed run."""

    alice: Alice
    receiver: Receiver
    deaf: Receiver
    _references: dict[tuple[bool, int], Reference] = field(default_factory=dict)
    _locks: defaultdict[tuple[bool, int], Lock] = field(default_factory=lambda: defaultdict(Lock))

    @classmethod
    def on(cls, cluster: Cluster, image: str) -> Bench:
        cluster.write("/home/alice/faulty/faulty.py", (Path(__file__).parent / "faulty.py").read_text())
        bench = cls(Alice(cluster, image), Receiver(cluster, 8080), Receiver(cluster, faults.DEAF))
        for path, receiver in ((WEBHOOK, bench.receiver), (f"{WEBHOOK}-deaf", bench.deaf)):
            cluster.write(path, receiver.url + "\n", mode=0o600)
        return bench

    def close(self) -> None:
        for receiver in (self.receiver, self.deaf):
            receiver.stop()

    def submit(self, name: str, changes: dict[str, Any]) -> Run:
        return self.alice.submit(self.alice.job_file(name, **merged(JOB, changes)))

    def reference(self, scenario: Scenario) -> Reference:
        """The undisturbed run to compare with: of the same ranks, or without dropout and on half of them."""
        kind = scenario.undisturbed
        with self._locks[kind]:
            if kind not in self._references:
                half = {"resources": {"nodes": 1}, "train": {"data": {"dropout": 0.0}}}
                # Two of them may be submitted at once, each from a job file of its own.
                name, changes = ("undisturbed", {}) if scenario.same else ("undisturbed-half", half)
                run = self.submit(f"{name}-{scenario.steps}", merged(changes, {"train": {"steps": scenario.steps}}))
                wait_ended(run, "done", 240)
                self._references[kind] = Reference.of(run, scenario.steps)
            return self._references[kind]


@dataclass(frozen=True)
class Reference:
    """The undisturbed run: samples by step and rank, and every tensor of its last checkpoint."""

    samples: dict[int, list[list[int]]]
    tensors: dict[str, Any]

    @classmethod
    def of(cls, run: Run, steps: int) -> Reference:
        launches = traces(run)
        assert list(launches) == [0] and sorted(launches[0]) == list(range(1, steps + 1))
        return cls(launches[0], tensors(run, steps))


def traces(run: Run) -> dict[int, dict[int, list[list[int]]]]:
    """{attempt: {step: the sample ids of each rank}}; of a step done twice in an attempt, the last time."""
    found: dict[int, dict[int, list[list[int]]]] = {}
    for folder in sorted((run.folder / "trace").glob("attempt-*")):
        ranks = [
            {row["step"]: row["ids"] for row in run.lines(str(path.relative_to(run.folder)))}
            for path in sorted(folder.glob("rank-*.jsonl"))
        ]
        # A step that not every rank had begun when they were ended is done again later.
        whole = set.intersection(*(set(rank) for rank in ranks)) if ranks else set()
        found[int(folder.name.removeprefix("attempt-"))] = {
            step: [rank[step] for rank in ranks] for step in sorted(whole)
        }
    return found


def untold(run: Run) -> set[int]:
    """Steps whose samples a rank could not write down, as its next line says: the disk was full."""
    rows = [
        row
        for path in (run.folder / "trace").glob("attempt-*/rank-*.jsonl")
        for row in run.lines(str(path.relative_to(run.folder)))
    ]
    return {step for row in rows for step in range(row["step"] - row.get("lines_lost", 0), row["step"])}


def tensors(run: Run, step: int) -> dict[str, Any]:
    """All tensors of a checkpoint: weights and the optimizer's state."""
    import torch

    from slurmddp.runtime.checkpoint import shards

    folder = run.folder / f"checkpoints/step-{step:08d}"
    metadata = shards.read_metadata(folder)
    stored = metadata.state_dict_metadata
    found = {name: torch.empty(item.size, dtype=item.properties.dtype) for name, item in stored.items()}
    shards.read(folder, metadata, found)
    return found


def wait_ended(run: Run, state: str, timeout: float) -> dict[str, Any]:
    """Wait until `slurmddp status` says this state; another end that lasts is a failure, with all that the run says."""
    deadline = time.monotonic() + timeout
    other = 0
    while True:
        over = run.cluster.job_state(run.job_id) not in ("RUNNING", "COMPLETING") or other
        _, status = run.status() if over else (3, {"state": "running"})
        if status["state"] == state:
            return status
        # A job that Slurm requeues by itself is in its old end's state for a moment.
        other = other + 1 if status["state"] not in ("pending", "running", "requeued", "stopping") else 0
        assert other < 6 and time.monotonic() < deadline, f"not {state}: {status}\n{story(run)}"
        time.sleep(1)


def check_samples(run: Run, reference: Reference, scenario: Scenario) -> None:
    """Every step that any attempt did had the samples of the undisturbed run, in the same order over the ranks."""
    launches = traces(run)
    for attempt, steps in launches.items():
        for step, ranks in steps.items():
            expected = reference.samples[step]
            same = list(chain(*ranks)) == list(chain(*expected))
            assert same, f"attempt {attempt}, step {step}: {ranks}, not {expected}\n{story(run)}"
            if scenario.same:
                assert ranks == reference.samples[step], f"attempt {attempt}, step {step}"
    done = {step for steps in launches.values() for step in steps}
    if scenario.ends == "done":
        missing = set(reference.samples) - done - untold(run)
        assert not missing, f"steps missing: {missing}\n{story(run)}"
        assert done <= set(reference.samples)


def check_weights(run: Run, reference: Reference, scenario: Scenario) -> None:
    """The last checkpoint's tensors: equal bit for bit, or close where the ranks were others for a while."""
    import torch

    found = tensors(run, scenario.steps)
    assert found.keys() == reference.tensors.keys()
    for name, tensor in found.items():
        expected = reference.tensors[name]
        if scenario.same:
            assert torch.equal(tensor, expected), f"{name} differs by {(tensor - expected).abs().max()}\n{story(run)}"
        else:
            # Other ranks add in another order.
            assert torch.allclose(tensor.float(), expected.float(), rtol=1e-3, atol=1e-5), name


def left_on(cluster: Cluster, run: Run) -> list[tuple[str, str]]:
    """(node, what) is still there of a run: processes, shared memory, scratch folders."""
    wanted = f"(SLURM_JOB_ID={run.job_id}|SLURMDDP_RUN={run.answer['run_folder']})$"
    script = (
        f"for p in $(grep -lzsE '{wanted}' /proc/[0-9]*/environ); do d=${{p%/environ}};"
        " grep -qs '^State:.[ZX]' $d/status || echo process ${d#/proc/} $(tr '\\0' ' ' <$d/cmdline); done;"
        f" find /tmp /dev/shm -maxdepth 1 -user alice -name '*{run.id}*'; true"
    )
    return [
        (node, line)
        for node in cluster.nodes
        if cluster.host_is_up(node)
        for line in cluster.sh(node, script, user="root").stdout.splitlines()
    ]


def check_clean(cluster: Cluster, run: Run, scenario: Scenario) -> None:
    """Nothing of the run is left on any node soon after its end; on one that was cut off, once it is reached again."""
    left: list[tuple[str, str]] = []
    if scenario.alone:
        for node in filter(cluster.host_is_up, cluster.nodes):
            cluster.mend_network(node)

    def clean() -> bool:
        left[:] = left_on(cluster, run)
        return not left

    try:
        cluster.wait_for(clean, "no process is left", 60 if scenario.alone else 20, every=0.5)
    except ClusterError:
        raise AssertionError(f"left: {left}\n{story(run)}") from None


def check_ledger(alice: Alice, run: Run) -> dict[str, Any]:
    """The kinds of time add up to the whole."""
    found: dict[str, Any] = json.loads(alice.command("status", run.id, "--time", "--json", check=False).stdout)
    assert round(sum(found["seconds"].values()), 3) == found["wall_seconds"] == round(found["end"] - found["begin"], 3)
    return found


def check_alerts(receiver: Receiver, run: Run, injected: Injected, scenario: Scenario) -> list[dict[str, Any]]:
    """The right messages came, each once, and the one about the fault names what was injected."""
    last = "finished" if scenario.ends == "done" else "stopping"
    receiver.cluster.wait_for(lambda: any(a["kind"] == last for a in receiver.alerts(run)), f"alert {last}", 40)
    alerts = receiver.alerts(run)
    kinds = [alert["kind"] for alert in alerts]
    assert len({alert["key"] for alert in alerts}) == len(alerts), kinds
    assert kinds[0] == "started" and kinds.count("started") == kinds.count(last) == 1, kinds
    if scenario.silent:
        assert kinds == ["started", "finished"], kinds
    if scenario.alert is None:
        return alerts
    told = [alert for alert in alerts if alert["kind"] == scenario.alert]
    assert told, f"no alert {scenario.alert}: {kinds}\n{story(run)}"
    for word in scenario.says:
        assert word in told[0]["cause"], told[0]
    if injected.node:
        assert told[0]["node"] == injected.node, (injected, told[0])
    if injected.rank is not None:
        assert told[0]["rank"] == injected.rank, (injected, told[0])
    return alerts


# --- what it cost

#: Events that are no sign of trouble.
_USUAL = frozenset(
    {"checkpoint_saved", "evaluated", "alert", "timing", "ready", "first_step", "started", "rank_started", "resumed"}
    | {"straggler_begins", "straggler_ends", "links_probed", "finished", "weights_loaded", "cleaned", "preflight"}
)


@dataclass(frozen=True)
class Cost:
    """What a fault cost.

    detection   seconds from the fault to its first sign in the events; None where there was none
    recovery    seconds from the fault to the first step of the next start of the ranks; None where there was none
    lost        steps that were done again
    fresh       seconds from the start of the ranks' processes to their first step, at the run's first start
    reload      seconds that the next start took longer for its checkpoint
    slurm       seconds until Slurm had given up a node; None where it gave up none
    """

    detection: float | None
    recovery: float | None
    lost: int
    fresh: float
    reload: float
    slurm: float | None


def cost(run: Run, injected: Injected) -> Cost:
    """From the events and the metrics."""
    rows = run.lines("events.jsonl")
    first = {row["event"]: row for row in reversed(rows)}
    began = first["rank_started"]["time"] - first["rank_started"]["seconds"]
    fresh = first["first_step"]["time"] - began
    after = [row for row in rows if row["time"] > injected.time]
    signs = [row for row in after if row["event"] not in _USUAL and row.get("decision") != "done"]
    detection = signs[0]["time"] - injected.time if signs else None
    slurm = next((row["time"] - injected.time for row in after if row["event"] == "node_excluded"), None)
    again = {row["event"]: row for row in reversed(after)}
    if "ready" not in again or "started" not in again:
        return Cost(detection, None, 0, fresh, 0, slurm)
    steps = run.metrics()
    goes_on = next((row["time"] for row in steps if row["time"] > again["ready"]["time"]), None)
    reached = max((row["step"] for row in steps if row["time"] < again["ready"]["time"]), default=0)
    longer = (again["ready"]["time"] - again["started"]["time"]) - (first["ready"]["time"] - first["started"]["time"])
    recovery = None if goes_on is None else goes_on - injected.time
    return Cost(detection, recovery, reached - again["ready"]["step"], fresh, max(0.0, longer), slurm)


@dataclass(frozen=True)
class Outcome:
    """A scenario that was played, and held."""

    run: Run
    injected: Injected
    cost: Cost
    alerts: list[dict[str, Any]]


def play(bench: Bench, scenario: Scenario, chance: random.Random) -> Outcome:
    """Submit the job, do the harm, and check all that has to hold. Raises AssertionError that tells the run's story."""
    cluster = bench.alice.cluster
    reference = bench.reference(scenario)
    receiver = bench.deaf if scenario.deaf else bench.receiver
    name = re.sub("[^a-z]+", "-", scenario.name.lower())
    run = bench.submit(name, merged(scenario.job, {"train": {"steps": scenario.steps}}))
    injected = scenario.fault(cluster, run, chance)
    assert injected.step < scenario.steps - 10, f"{injected} came too late to be a test"
    wait_ended(run, scenario.ends, scenario.timeout)
    if scenario.deaf:
        receiver.start()
        run.status()  # the next command on the login node sends what could not be sent
    assert any(row["event"] == scenario.event for row in run.lines("events.jsonl")), story(run)
    check_samples(run, reference, scenario)
    if scenario.ends == "done":
        check_weights(run, reference, scenario)
    check_clean(cluster, run, scenario)
    check_ledger(bench.alice, run)
    alerts = check_alerts(receiver, run, injected, scenario)
    return Outcome(run, injected, cost(run, injected), alerts)
