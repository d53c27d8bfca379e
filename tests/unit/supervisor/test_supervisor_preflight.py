"""What becomes of the verdicts of the preflight and of the measurement of the network."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurmddp.records import network, preflight
from slurmddp.records.cause import Cause
from slurmddp.records.job_events import Measured, Network, NodeExcluded, Preflight
from slurmddp.records.preflight import Finding, bad, warn
from slurmddp.supervisor.brain.types import FAILED, NEXT, REQUEUE
from slurmddp.supervisor.files import Files
from slurmddp.supervisor.job import Nodes
from slurmddp.supervisor.preflight import check_nodes, measure_network

FACTS = Measured("ok", bus_gb_s=187.4)
LOW = FACTS._replace(result="low")


class Played(SimpleNamespace):
    """A job whose nodes do what `step` does, and that writes down what is said. Its run folder is a real one."""

    def __init__(self, run: Path, names: list[str], train: int, step: Callable[[Played], None]) -> None:
        logs = run / "logs"
        (logs / "preflight").mkdir(parents=True)
        files = Files(str(run))
        answer: Callable[..., Any] = lambda name, *words, **_: getattr(files, name)(*words)  # noqa: E731
        super().__init__(run=str(run), logs=str(logs), decision="", cause=None, exit_code=0)
        self.said, self.events, self.asked = [], [], []
        self.nodes = Nodes(train, train)
        self.nodes.usable = list(names)
        self.folder = SimpleNamespace(ask=answer, tell=answer, known=lambda _, name, *words: answer(name, *words))
        self.values = SimpleNamespace(number=lambda _: 60, node_script=lambda: ["bash", "node.sh"])
        self.loop = SimpleNamespace(rest=lambda _: None)
        self.say, self.event = self.said.append, self.events.append
        self._step = step

    head = "n1"

    def must_end(self) -> bool:
        return False

    def choose_port(self, head: str) -> None:
        pass

    def exclude(self, reason: str, nodes: list[str], note: Callable[[str, str], Any]) -> None:
        self.events.extend(note(node, reason) for node in nodes)
        self.nodes.exclude(nodes)

    def on_nodes(self, *_: Any, **__: Any) -> int:
        self.asked.append(list(self.nodes.chosen))
        self._step(self)
        return 0


def checked(run: Path, names: list[str], findings: dict[str, tuple[Finding, ...]]) -> Played:
    """A job after a preflight with these findings."""

    def step(job: Played) -> None:
        Path(job.logs, "preflight", "verdict.json").write_text(json.dumps(preflight.Verdict(findings).write()))

    job = Played(run, names, len(names) - 2, step)
    assert check_nodes(job, lambda: False)  # type: ignore[arg-type]
    return job


def test_a_node_that_is_lost_meanwhile_blames_no_other_one(tmp_path: Path) -> None:
    """Its heartbeats have stopped, which ended the step: nobody has answered."""
    job = Played(tmp_path, ["n1", "n2", "n3"], 2, lambda job: job.nodes.exclude(["n2"]))
    assert not check_nodes(job, lambda: False)  # type: ignore[arg-type]
    assert (job.decision, job.cause) == (NEXT, Cause("no heartbeat for 5 s", node="n2"))
    assert job.nodes.usable == ["n1", "n3"] and job.events == [] and len(job.asked) == 1


def test_the_verdict_on_4096_nodes(tmp_path: Path) -> None:
    """One node is broken, and nothing is said of another one."""
    names = [f"n{number}" for number in range(1, 4097)]
    broken = (bad("GPU 3: \x1b[31mfell off the bus", ""), warn("its clock is late", "ask"))
    job = checked(tmp_path, names, {**dict.fromkeys(names[:-1], ()), "n7": broken, "strange": ()})
    assert job.nodes.excluded == ["n7", "n4096"] and len(job.nodes.usable) == 4094 and job.decision == NEXT
    assert job.events[:2] == [
        NodeExcluded("n7", "preflight: GPU 3: [31mfell off the bus", "preflight"),
        NodeExcluded("n4096", f"preflight: no answer: see {tmp_path}/logs/preflight/n4096.log", "preflight"),
    ]
    assert job.events[2]._replace(seconds=0) == Preflight(0, "n7 n4096", 4096, ("n7: its clock is late - ask",))


@pytest.mark.parametrize(
    ("findings", "decision"),
    [
        ({"n1": "user", "n2": "user"}, FAILED),
        ({"n1": "", "n2": ""}, FAILED),
        ({"n1": "user", "n2": None}, REQUEUE),
        ({"n1": "", "n2": None}, REQUEUE),
    ],
)
def test_other_nodes_would_not_help_where_all_have_the_fault(
    tmp_path: Path, findings: dict[str, str | None], decision: str
) -> None:
    def step(job: Played) -> None:
        said = {node: () if fault is None else (bad("no disk", "", fault),) for node, fault in findings.items()}
        Path(job.logs, "preflight", "verdict.json").write_text(json.dumps(preflight.Verdict(said).write()))

    job = Played(tmp_path, list(findings), 2, step)
    assert not check_nodes(job, lambda: False)  # type: ignore[arg-type]
    assert (job.decision, job.cause) == (decision, Cause("preflight: no disk", node="n1"))
    alone = Played(tmp_path / "alone", ["n1"], 1, step)
    assert not check_nodes(alone, lambda: False)  # type: ignore[arg-type]
    assert alone.decision == (FAILED if findings["n1"] == "user" else REQUEUE)


@pytest.mark.parametrize("text", ["{", "[]", '{"nodes": {"n1": 3}}'])
def test_a_damaged_verdict_is_none(tmp_path: Path, text: str) -> None:
    def step(job: Played) -> None:
        Path(job.logs, "preflight", "verdict.json").write_text(text)

    job = Played(tmp_path, ["n1", "n2"], 1, step)
    assert not check_nodes(job, lambda: False), "the others are not checked yet"  # type: ignore[arg-type]
    assert job.events[0] == NodeExcluded(
        "n1", f"preflight: no answer: see {tmp_path}/logs/preflight/n1.log", "preflight"
    )


def measured(
    run: Path, *verdicts: network.Verdict | None, names: tuple[str, ...] = ("n1", "n2", "n3"), train: int = 2
) -> Played:
    """A job before measurements with these verdicts; None: the step left none."""
    left = list(verdicts)

    def step(job: Played) -> None:
        verdict = left.pop(0)
        if verdict:
            Path(job.logs, "network", "verdict.json").write_text(json.dumps(verdict.write()))

    job = Played(run, list(names), train, step)
    job.nodes.choose()
    return job


def test_a_good_network_is_measured_once_for_the_same_nodes(tmp_path: Path) -> None:
    text = "NCCL over IB mlx5_0..3, bus 187 GB/s"
    job, before = measured(tmp_path, network.Verdict(text, FACTS)), []
    for _ in range(2):
        assert measure_network(job, lambda: False, before)  # type: ignore[arg-type]
    assert (job.asked, job.said, job.decision) == ([["n1", "n2"]], [f"network: {text}"], "")
    (event,) = job.events
    assert isinstance(event, Network) and event.text == text
    assert (event.measured.result, event.measured.bus_gb_s) == ("ok", 187.4)


def test_tcp_fails_the_run_with_its_reason(tmp_path: Path) -> None:
    job = measured(tmp_path, network.Verdict('NCCL uses TCP ("x") - do this', FACTS._replace(result="tcp")))
    assert not measure_network(job, lambda: False, [])  # type: ignore[arg-type]
    assert (job.decision, job.cause, job.exit_code) == (FAILED, Cause('NCCL uses TCP ("x") - do this'), 1)


def test_a_slow_node_is_replaced_by_a_spare_and_the_others_are_measured_again(tmp_path: Path) -> None:
    low = network.Verdict("bus 12 GB/s; slow: n2", LOW, {"n2": "slow network: 5 GB/s with n1"})
    job = measured(tmp_path, low, network.Verdict("fine", FACTS))
    assert measure_network(job, lambda: False, [])  # type: ignore[arg-type]
    assert (job.asked, job.nodes.chosen) == ([["n1", "n2"], ["n1", "n3"]], ["n1", "n3"])
    assert NodeExcluded("n2", "network: slow network: 5 GB/s with n1", "network") in job.events


def test_a_slow_node_without_a_spare_is_kept(tmp_path: Path) -> None:
    low = network.Verdict("bus 12 GB/s; slow: n2", LOW, {"n2": "slow network"})
    job = measured(tmp_path, low, names=("n1", "n2"))
    assert measure_network(job, lambda: False, [])  # type: ignore[arg-type]
    assert job.nodes.chosen == ["n1", "n2"] and [type(event) for event in job.events] == [Network]


def test_a_measurement_that_failed_stops_nothing(tmp_path: Path) -> None:
    job = measured(tmp_path, None)
    assert measure_network(job, lambda: False, [])  # type: ignore[arg-type]
    assert (job.events[0].measured.result, job.events[0].text) == ("none", f"not measured: see {tmp_path}/logs/network")


def test_one_node_is_not_measured(tmp_path: Path) -> None:
    job = measured(tmp_path, names=("n1",), train=1)
    assert measure_network(job, lambda: False, []) and job.asked == []  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("finding", "fault"),
    [
        (bad("no torch in /usr/bin/python3", "install it in the image", "user"), "user"),
        (bad("n2 cannot connect to n1; slurmddp excludes one of the two", "check the switch", "either"), "either"),
        (bad("GPU 3 is slow", "ask the site"), ""),
    ],
)
def test_whose_fault_a_bad_node_is(tmp_path: Path, finding: Finding, fault: str) -> None:
    job = checked(tmp_path, ["n1", "n2", "n3"], {"n1": (), "n2": (finding,), "n3": ()})
    assert job.events[0] == NodeExcluded("n2", f"preflight: {finding.text}", "preflight", fault)
