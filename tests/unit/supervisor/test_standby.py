"""recovery.standby: when a guard takes over, that only one does, and that who has lost the lease writes nothing."""

from __future__ import annotations

import signal
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurmddp.records import events, json_lines
from slurmddp.records.job_events import AttemptEnded, AttemptStarted, JobStarted, NodeExcluded, NoStandby
from slurmddp.render.scripts import job_script
from slurmddp.supervisor import order, scheduler, standby
from slurmddp.supervisor.files import Files
from slurmddp.supervisor.lease import Lease
from slurmddp.supervisor.scheduler import Slurm
from slurmddp.supervisor.standby import Contact, Standby
from tests.helpers import LM_JOB, Desk

LEADER = Lease(1, 5, "aa.node1")


class World:
    """A guard on `host` of a job that node1 leads, with a clock of its own. lives: do kernels answer?"""

    def __init__(self, host: str = "node2", candidates: str = "yes node2 node3") -> None:
        self.seconds, self.lives, self.asked = 0.0, True, 0
        self.leader: Any = LEADER
        self.state, self.nodes, self.started = "RUNNING", ["node1", "node2"], "node1 node2"
        self.took: list[Any] = []
        scheduler = SimpleNamespace(
            host=host, ask=lambda: self.state != "", nodes=lambda: self.nodes, job=SimpleNamespace(state="")
        )
        folder = SimpleNamespace(known=self.known, take_lease=lambda *seen: self.took.append(seen) or True)
        words = {"standby": candidates}
        self.job: Any = SimpleNamespace(folder=folder, scheduler=scheduler, values=SimpleNamespace(words=words))
        self.standby = Standby(self.job, lambda: self.seconds, self.answers)

    def answers(self, address: str) -> bool:
        self.asked += 1
        return self.lives

    def known(self, default: Any, name: str, *arguments: Any) -> Any:
        if name == "leader":
            return self.leader
        facts = AttemptStarted(self.started) if self.started else JobStarted("node[1-2]", None)
        return events.Event(facts, 1.0, 0, "7", "node1").write()

    def lost_at(self, *moments: float) -> list[bool]:
        found = []
        for self.seconds in moments:
            found.append(self.standby.lost())
        return found

    def may_succeed(self) -> bool:
        self.lost_at(0)
        self.job.scheduler.job.state = self.state
        return self.standby.may_succeed()


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda host: f"address of {host}")


def test_a_leader_is_lost_once_its_lease_stands_still_and_its_kernel_is_silent() -> None:
    world = World()
    assert world.lost_at(0, 10) == [False] * 2  # its node answers: it was stopped, or is busy
    world.leader, world.lives = LEADER._replace(renewal=6), False
    assert world.lost_at(11, 14, 14.6) == [False, False, True]
    world.leader = LEADER._replace(renewal=7)
    assert world.lost_at(15) == [False]


def test_the_kernel_of_a_leader_that_renews_is_asked_once() -> None:
    world = World()
    world.lost_at(0, 1, 2, 3)
    assert world.asked == 1


def test_each_further_node_leaves_it_to_those_before_it() -> None:
    moments = (0, 3.6, 6.4, 6.6, 60)
    found = {}
    for host in ("node2", "node3", "node9"):
        world = World(host)
        assert world.lost_at(0) == [False]
        world.lives = False
        found[host] = world.lost_at(*moments)
    assert found["node2"] == [False, True, True, True, True]
    assert found["node3"] == [False, False, False, True, True]
    assert found["node9"] == [False] * 5, "each look costs: most nodes do not look"


def test_a_taker_that_dies_is_replaced() -> None:
    """Although nobody has asked its kernel while it lived."""
    world = World("node3")
    world.lost_at(0)
    world.leader, world.lives = Lease(2, 0, "bb.node2"), False
    assert world.lost_at(10, 16, 16.6) == [False, False, True]
    assert world.standby.take() and world.took == [(Lease(2, 0, "bb.node2"), "node3")]


def test_a_node_that_never_answers_may_be_behind_a_firewall() -> None:
    world = World()
    world.lives = False
    assert world.lost_at(0, 60) == [False] * 2


def test_a_node_without_an_address_may_live(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(host: str) -> str:
        raise OSError("Temporary failure in name resolution")

    world = World()
    with monkeypatch.context() as patched:
        patched.setattr(socket, "gethostbyname", unknown)
        assert world.lost_at(0, 60) == [False] * 2
    world.lives = False
    assert world.lost_at(61) == [False], "and it has never answered"


def test_a_folder_that_does_not_answer_says_nothing() -> None:
    world = World()
    assert world.lost_at(0) == [False]
    world.lives, world.leader = False, None
    assert world.lost_at(10, 20) == [False] * 2
    world.leader = LEADER
    assert world.lost_at(21, 24, 25) == [False, False, True]  # the leader may not have reached it either


def test_nobody_succeeds_itself() -> None:
    world = World()
    world.leader = Lease(1, 5, "aa.node2")
    assert world.lost_at(0) == [False]
    world.lives = False
    assert world.lost_at(60) == [False]


@pytest.mark.parametrize(
    ("changed", "may"),
    [
        ({}, True), ({"started": ""}, True), ({"state": ""}, False), ({"state": "COMPLETING"}, False),
        ({"nodes": ["node1"]}, False), ({"nodes": None}, False), ({"started": "node1"}, False),
        ({"leader": None}, False),
    ],
)  # fmt: skip
def test_who_may_succeed(changed: dict[str, Any], may: bool) -> None:
    """Not a node that is cut off itself, and not where ranks may go on, on the leader's node alone."""
    world = World()
    vars(world).update(changed)
    assert world.may_succeed() is may


def test_a_guard_is_over_once_a_newer_leader_has_guards() -> None:
    world, over = World(), []
    for generation, renewal in ((1, 90), (2, 0), (2, 60), (3, 5), (3, 61)):
        world.leader = Lease(generation, renewal, "bb.node3")
        world.lost_at(0)
        over.append(world.standby.is_over())
    assert over == [False, False, False, False, True]


def test_only_the_guard_of_the_leaders_node_takes_up_what_was_killed() -> None:
    world = World("node1")
    assert world.standby.take_here() and world.took == [(LEADER, "node1")]
    other = World("node2")
    assert not other.standby.take_here() and not other.took


def test_three_other_nodes_may_take_over() -> None:
    job: Any = SimpleNamespace(
        scheduler=SimpleNamespace(host="n2"), nodes=SimpleNamespace(usable=["n1", "n2", "n3", "n4", "n5"])
    )
    assert standby.candidates(job) == "yes n1 n3 n4"


class Leader:
    """A leader on a node of a job. answers: does Slurm?"""

    def __init__(self, nodes: int = 2, began: bool = True) -> None:
        self.seconds, self.answers, self.asked, self.renewed = 0.0, False, 0, 0
        job: Any = SimpleNamespace(
            nodes=SimpleNamespace(usable=["n"] * nodes), scheduler=SimpleNamespace(ask=self.ask),
            folder=SimpleNamespace(renew=self.renew),
        )  # fmt: skip
        self.job = job
        self.contact = Contact(job, lambda: self.seconds)
        if began:
            self.look_until(100, hears=True)  # its guards have started

    def ask(self) -> bool:
        self.asked += 1
        return self.answers

    def renew(self) -> None:
        self.renewed += 1

    def look_until(self, end: float, hears: bool) -> bool:
        while self.seconds < end:
            self.seconds += 0.5
            self.contact.look(hears)
        return self.contact.holds()


def test_a_leader_renews_once_a_second_and_does_not_ask_slurm_while_it_hears_others() -> None:
    leader = Leader()
    assert (leader.renewed, leader.asked, leader.contact.holds()) == (100, 0, True)


def test_a_leader_that_hears_neither_another_node_nor_slurm_is_cut_off() -> None:
    leader = Leader()
    assert leader.look_until(100.5, hears=False) and not leader.look_until(101.5, hears=False)
    leader.answers = True
    assert leader.look_until(106, hears=False) and leader.look_until(200, hears=False)
    leader.answers = False
    assert not leader.look_until(210, hears=False) and leader.look_until(210.5, hears=True)
    assert leader.asked < 30


def test_the_last_node_of_a_job_asks_seldom() -> None:
    leader = Leader(nodes=1)
    leader.answers = True
    assert leader.look_until(400, hears=False) and leader.asked <= 6


def test_a_leader_that_excludes_the_only_other_node_is_still_cut_off() -> None:
    leader = Leader()
    leader.look_until(105, hears=False)
    leader.job.nodes.usable = ["n"]
    assert not leader.look_until(150, hears=False)


def test_a_leader_whose_guards_start_is_not_cut_off() -> None:
    leader = Leader(began=False)
    assert leader.look_until(30, hears=False)
    leader.look_until(31, hears=True)
    assert not leader.look_until(33, hears=False), "once it was heard, silence counts"


def test_who_has_lost_the_lease_ends_its_ranks_and_exits_only_with_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm would end the job with job.sh."""
    did: list[Any] = []
    reports = ["", "JobState=RUNNING ", "JobState=SUSPENDED ", "JobState=COMPLETING ExitCode=3:0 "]
    monkeypatch.setattr(signal, "sigtimedwait", lambda *_: did.append("waits"))
    monkeypatch.setattr(signal, "pthread_sigmask", lambda *_: None)
    monkeypatch.setattr(subprocess, "call", lambda words, env, stdout: did.append((words[-1], env["SLURMDDP_SWEEP"])))
    job: Any = SimpleNamespace(
        loop=SimpleNamespace(be_deaf=lambda: did.append("deaf")), child=SimpleNamespace(kill=did.append),
        folder=SimpleNamespace(), env={"SLURMDDP_RENDEZVOUS_ID": "run-7-0"}, logs="/logs",
        sweep_environment=lambda attempt, logs: {"SLURMDDP_SWEEP": attempt},
        values=SimpleNamespace(program=lambda name: ["bash", name]),
        scheduler=SimpleNamespace(report=lambda: " " + reports.pop(0)),
    )  # fmt: skip
    assert standby.step_back(job) == 3
    assert did == ["deaf", 9, ("sweep", "run-7-0"), *["waits"] * 4] and not reports


def test_steps_of_a_guard_are_as_those_of_job_sh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "6000")
    monkeypatch.delenv(standby.BATCH_ENV, raising=False)
    beside = standby.batch_environment()
    job: Any = SimpleNamespace(
        env={standby.BATCH_ENV: beside, "SLURM_STEP_ID": "3", "SLURM_MEM_PER_NODE": "0", "A": "1"}
    )
    standby.be_as_job_sh(job)
    assert job.env["SLURM_MEM_PER_NODE"] == "6000" and "SLURM_STEP_ID" not in job.env and job.env["A"] == "1"
    monkeypatch.setenv(standby.BATCH_ENV, "{}")
    assert standby.batch_environment() == "{}", "a successor's guards get those of job.sh, too"


def test_a_successor_reads_what_was_recorded(tmp_path: Path) -> None:
    def line(facts: Any, attempt: int) -> bytes:
        return json_lines.dump(events.Event(facts, 1.0, attempt, "7", "node1").write())

    rows = [
        line(JobStarted("node[1-3]", None), 0), line(NodeExcluded("node9", "bad"), 0),
        line(JobStarted("node[1-3]", None), 1), line(AttemptStarted("node1 node2"), 1),
        line(AttemptEnded(1, "boom", "node1", 0, "next"), 1), line(NodeExcluded("node3", "bad"), 2),
        line(AttemptStarted("node1 node2"), 2),
    ]  # fmt: skip
    (tmp_path / "events.jsonl").write_bytes(b"".join(rows))
    files = Files(str(tmp_path))
    folder = SimpleNamespace(ask=lambda name, begin, patience: getattr(files, name)(begin))
    job: Any = SimpleNamespace(attempt=2, events_read=0, folder=folder, nodes=SimpleNamespace(excluded=[]))
    assert standby.take_up(job) == (["node1", "node2"], None)
    assert job.nodes.excluded == ["node3"] and job.events_read == len(b"".join(rows))
    ended = AttemptEnded(0, "", "", None, "done")
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(line(ended, 2))
    assert standby.take_up(job)[1] == ended


@pytest.mark.parametrize(("state", "withdrawn"), [("RUNNING", True), ("COMPLETING", False)])
def test_a_job_that_slurms_library_cannot_end_is_cancelled(
    monkeypatch: pytest.MonkeyPatch, state: str, withdrawn: bool
) -> None:
    ran: list[list[str]] = []

    def run(words: list[str], seconds: float, errors: int = 0) -> Any:
        ran.append(words)
        linked = "libc.so => /lib/libc.so\n\tlibslurmfull.so => /opt/libslurmfull.so (0x7f)\n"
        return SimpleNamespace(code=0, text=linked if words[0] == "bash" else f"JobId=7 JobState={state} Reason=None")

    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node1")
    Slurm(SimpleNamespace(run=run)).complete(1)  # type: ignore[arg-type]
    assert ran[1][-3:] == ["/opt/libslurmfull.so", "7", "256"]
    assert (["scancel", "7"] in ran) is withdrawn


@pytest.mark.parametrize("version", [43, 44])
def test_slurms_library_gets_the_job_as_its_version_has_it(monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    """Since Slurm 25.11 by a pointer to 64 and three times 32 bits; tests/cluster/test_standby.py tries both."""
    given: list[Any] = []

    def complete(job: Any, code: Any) -> int:
        given.append((job.value if version < 44 else [*job._obj], code.value))
        return 0

    library = SimpleNamespace(
        slurm_init=lambda path: None, slurm_api_version=lambda: version << 16, slurm_complete_job=complete
    )
    monkeypatch.setattr("ctypes.CDLL", lambda path, mode: library)
    monkeypatch.setattr("sys.argv", ["-c", "libslurm.so", "7", "256"])
    with pytest.raises(SystemExit) as ended:
        exec(scheduler._COMPLETE, {})
    assert ended.value.code is False
    assert given == [(7 if version < 44 else [0, 0, 7, 0xFFFFFFFE, 0xFFFFFFFE, 0], 256)]


@pytest.mark.parametrize("began", [True, False])
@pytest.mark.parametrize("ends", [True, False])
def test_job_sh_waits_while_another_node_may_lead(desk: Desk, began: bool, ends: bool) -> None:
    """For Slurm's answer, then for a lease of this node, which a test cannot wait for: it comes while it sleeps."""
    wanted = ("recovery.standby=true", "recovery.heartbeats=true", "resources.nodes=2+1")
    script = job_script(desk.plan(LM_JOB, *wanted))
    function = script[script.index("wait_for_lead() {") :].partition("\n}\n")[0] + "\n}\n"
    (desk.root / "run/lease").mkdir(parents=True)
    (desk.root / "run/lease/2.7.aa.node2").touch()
    if began:
        (desk.root / "leads").touch()
    state = "COMPLETING" if ends else "RUNNING"
    desk.program("scontrol", f'#!/bin/bash\necho asks >>"$folder/did"; [[ -e $folder/up ]] && echo JobState={state}\n')
    desk.program(
        "sleep",
        '#!/bin/bash\necho sleeps >>"$folder/did"\n'
        '[[ -e $folder/up ]] && mv "$run/lease/2.7.aa.node2" "$run/lease/3.0.bb.node1"; touch "$folder/up"\n',
    )
    program = f"export run=$0/run folder=$0 SLURM_JOB_ID=7 SLURMD_NODENAME=node1\n{function}wait_for_lead\n"
    subprocess.run(["bash", "-c", program, str(desk.root)], env=desk.environment, timeout=20, check=True)
    did = (desk.root / "did").read_text().split() if began else []
    assert did == (["asks", "sleeps", "asks", *([] if ends else ["sleeps", "asks"])] if began else [])
    assert script.count("wait_for_lead") == 3, "in the epilogue, and where it kills itself for the guard"


def test_without_slurms_library_no_node_takes_over() -> None:
    did: list[Any] = []
    words = {"guarded": "yes", "heartbeats": "", "standby": "yes"}
    job: Any = SimpleNamespace(
        values=SimpleNamespace(words=words, yes=lambda name: bool(words[name])), event=did.append,
        scheduler=SimpleNamespace(library=lambda: ""),
        guard=SimpleNamespace(start=lambda: did.append(words["standby"])),
    )  # fmt: skip
    order._start_guard(job, SimpleNamespace(list_nodes=lambda: None))  # type: ignore[arg-type]
    assert did == [NoStandby("there is no libslurm beside scontrol"), ""]
