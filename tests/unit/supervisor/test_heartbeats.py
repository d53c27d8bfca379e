"""Heartbeats of nodes: what the brain makes of them, and that only the run's own guards can send them."""

from __future__ import annotations

import signal
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from slurmddp.records.job_events import Heartbeats as Heard
from slurmddp.records.job_events import NodeExcluded
from slurmddp.records.signed import Key
from slurmddp.supervisor import order
from slurmddp.supervisor.brain.heartbeats import Heartbeats, Silent
from slurmddp.supervisor.folder import Unavailable
from slurmddp.supervisor.heartbeats import Receiver, Sender
from slurmddp.supervisor.job import Nodes
from slurmddp.supervisor.loop import Loop

KEY = Key(b"k" * 32)


class Cluster:
    """Nodes that send a heartbeat every half second, and a brain that looks as often."""

    def __init__(self, *nodes: str) -> None:
        self.brain, self.now, self.nodes = Heartbeats(0.0), 0.0, set(nodes)
        self.asked: set[str] = set()
        self.lost: list[tuple[float, str]] = []

    def run(self, seconds: float, *silent: str, looks: bool = True) -> list[tuple[float, str]]:
        """Let time pass. Return which nodes were lost in it, and when."""
        before = len(self.lost)
        for _ in range(int(seconds * 2)):
            self.now += 0.5
            for node in self.nodes - set(silent):
                self.brain.heard(node, int(self.now * 1000), self.now)
            if looks:
                found = self.brain.look(self.now)
                self.asked |= set(found.ask)
                self.lost += [(self.now, node) for node in found.lost]
        return self.lost[before:]


def test_a_silent_node_is_lost_once_after_five_seconds() -> None:
    cluster = Cluster("node2", "node3")
    assert cluster.run(100) == [] and cluster.asked == set()
    assert cluster.run(5, "node2") == [] and cluster.asked == {"node2"}
    assert cluster.run(60, "node2") == [(105.5, "node2")]
    assert cluster.run(60) == [], "it comes back: others have its place"
    assert cluster.run(60, "node2") == []


def test_a_node_that_was_never_heard_is_left_to_slurm() -> None:
    cluster = Cluster("node2", "node3")
    assert cluster.run(60, "node3") == [] and not cluster.brain.knows("node3")


def test_a_node_that_is_stopped_for_four_seconds_is_not_lost() -> None:
    cluster = Cluster("node2", "node3")
    cluster.run(10)
    assert [cluster.run(4, "node2") + cluster.run(1) for _ in range(10)] == [[]] * 10


def test_a_node_whose_kernel_answers_is_not_lost() -> None:
    cluster = Cluster("node2", "node3")
    cluster.run(10)
    for _ in range(10):
        assert cluster.run(4, "node2") == []
        cluster.brain.lives("node2", cluster.now)


def test_heartbeats_that_are_sent_again_or_come_late_are_no_sign_of_life() -> None:
    cluster = Cluster("node2", "node3")
    cluster.run(10)
    for number in range(20):
        cluster.run(0.5, "node2")
        cluster.brain.heard("node2", 10_000 - number * 500, cluster.now)
    assert cluster.lost == [(15.5, "node2")]


@pytest.mark.parametrize("stopped", [3, 8, 60])
def test_what_the_supervisor_missed_while_it_was_stopped_is_no_silence(stopped: int) -> None:
    cluster = Cluster("node2")
    cluster.run(10)
    cluster.run(stopped, "node2", looks=False)
    assert cluster.run(5, "node2") == [], "it starts to count again"
    assert len(cluster.run(1, "node2")) == 1


def test_silence_of_all_nodes_at_once_says_nothing_of_them() -> None:
    cluster = Cluster("node2", "node3", "node4")
    cluster.run(10)
    assert cluster.run(60, "node2", "node3", "node4") == []
    assert [node for _, node in cluster.run(2, "node4")] == ["node4"], "the network is back"
    racks = Cluster(*map(str, range(400)))
    racks.run(10)
    assert racks.run(20, *map(str, range(200))) == [] and len(racks.run(20, *map(str, range(100)))) == 100
    alone = Cluster("node2")
    alone.run(10)
    assert [node for _, node in alone.run(6, "node2")] == ["node2"]


class Stage:
    """A receiver on this machine, whose time the test sets. did: what it does to the job."""

    def __init__(self, chosen: str = "node1 node2", usable: str = "node1 node2 node3") -> None:
        self.now, self.did, self.events, self.killed = 0.0, [], [], []  # type: float, list[Any], list[Any], list[Any]
        nodes = Nodes(1, 2)
        nodes.usable, nodes.chosen = usable.split(), chosen.split()
        self.job: Any = SimpleNamespace(
            scheduler=SimpleNamespace(host="localhost"), nodes=nodes, event=self.events.append, exclude=self.exclude,
            child=SimpleNamespace(kill=self.killed.append), abort=signal.SIGKILL, ending="",
        )  # fmt: skip
        self.receiver = Receiver(self.job, KEY, lambda: self.now)
        _, port, self.belongs = self.receiver.where.split()
        self.port = int(port)

    def exclude(self, reason: str, nodes: list[str], note: Any) -> None:
        self.did += [note(node, reason) for node in nodes]
        self.job.nodes.exclude(nodes)

    def send(self, data: bytes) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.sendto(data, ("127.0.0.1", self.port))

    def pass_time(self, seconds: float, *nodes: str, key: Key = KEY, belongs: str = "") -> list[Any]:
        """Let so much time pass, in which these nodes send. Return what was done."""
        for _ in range(int(seconds * 2)):
            self.now += 0.5
            for node in nodes:
                content = f"{int(self.now * 1000)} {node}".encode()
                self.send(key.seal(content, "heartbeat", belongs or self.belongs))
            self.receiver.look()
        return self.did


@pytest.fixture
def dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel answers."""
    monkeypatch.setattr(Receiver, "_answers", lambda *_: False)


LOST = [NodeExcluded("node2", "no heartbeat for 5 s")]


@pytest.mark.usefixtures("dead")
def test_a_lost_node_is_excluded_and_ends_its_attempt() -> None:
    stage = Stage()
    assert stage.pass_time(10, "node1", "node2", "node3") == [] and stage.events == [Heard(3, "", stage.port)]
    assert stage.pass_time(5, "node1", "node3") == []
    assert stage.pass_time(60, "node1", "node3") == LOST and stage.killed == [signal.SIGKILL]
    assert stage.job.nodes.lost == ["node2"]


@pytest.mark.usefixtures("dead")
@pytest.mark.parametrize(("chosen", "ending", "done"), [("node1 node3", "", LOST), ("node2", "time limit", [])])
def test_the_loss_of_a_spare_and_of_a_job_that_ends_stops_nothing(chosen: str, ending: str, done: list[Any]) -> None:
    stage = Stage(chosen)
    stage.pass_time(5, "node1", "node2", "node3")
    stage.job.ending = ending
    assert stage.pass_time(10, "node1", "node3") == done and stage.killed == []


@pytest.mark.usefixtures("dead")
@pytest.mark.parametrize("wrong", [{"key": Key(b"x" * 32)}, {"belongs": "another job"}])
def test_forged_heartbeats_neither_keep_a_node_nor_lose_one(wrong: dict[str, Any]) -> None:
    stage = Stage()
    assert stage.pass_time(61, "node1", "node2", "node3", **wrong) == []
    assert stage.events == [Heard(0, "node1 node2 node3", stage.port)]
    stage.pass_time(5, "node1", "node2", "node3")
    assert stage.events[-1] == Heard(3, "", stage.port)
    for _ in range(12):
        stage.send(b"\0" * 1000)
        stage.pass_time(0.5, "node2", **wrong)
        stage.pass_time(0.5, "node1", "node3")
    assert stage.did == LOST


@pytest.mark.usefixtures("dead")
def test_a_datagram_that_is_sent_again_says_nothing() -> None:
    stage = Stage()
    recorded = KEY.seal(b"500 node2", "heartbeat", stage.belongs)
    for _ in range(20):
        stage.send(recorded)
        stage.pass_time(0.5, "node1", "node3")
    assert stage.did == LOST


def test_a_node_is_not_lost_with_its_guard() -> None:
    """This machine's kernel refuses the connection: it lives."""
    stage = Stage("node1 node2", "node1 node2 node3")
    stage.pass_time(5, "node1", "node2", "node3")
    assert stage.pass_time(60, "node1", "node3") == [] and stage.killed == []


@pytest.mark.parametrize("works", [True, False])
def test_without_a_key_the_job_starts_without_heartbeats(works: bool) -> None:
    stage, said, regular = Stage(), [], []  # type: Stage, list[str], list[float]

    def ask(name: str) -> str:
        if not works:
            raise Unavailable("UnsafeKeyError: other users can read the run's key")
        return KEY.secret.hex()

    job = stage.job
    job.folder, job.values, job.say = (
        SimpleNamespace(ask=ask),
        SimpleNamespace(words={"heartbeats": "yes"}, yes=lambda name: False),
        said.append,
    )
    job.loop = SimpleNamespace(watch=lambda *_: None, every=lambda seconds, _: regular.append(seconds))
    order._hear_nodes(job)
    handed = job.values.words["heartbeats"].split()
    assert (handed[:1], regular, len(said)) == ((["localhost"], [0.5], 0) if works else ([], [], 1))


def test_the_loop_calls_regularly_beside_what_it_waits_for() -> None:
    loop, calls = Loop(), []  # type: Loop, list[int]
    loop.every(0.01, lambda: calls.append(1))
    assert loop.run_until(lambda: len(calls) == 5, 30) and loop.run(["true"], 30).code == 0
    count = len(calls)
    loop.rest(0.1)
    assert count < len(calls) <= count + 11, "not more often"


def test_the_guards_heartbeats_are_those_that_the_supervisor_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(usable="node2")
    sender = Sender(KEY, stage.receiver.where, "node2")
    sender.send()
    stage.receiver.look()
    assert stage.events == [Heard(1, "", stage.port)]
    monkeypatch.setattr(sender, "_to", ("127.0.0.1", 0))
    sender.send()  # a network that fails is no error of the guard
    assert Heartbeats(0.0).look(9.0) == Silent()
