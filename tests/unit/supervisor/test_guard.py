"""The guard: as a program with stand-ins for Slurm, where job.sh was killed; in process, where its node is lost."""

from __future__ import annotations

import itertools
import json
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurmddp.records.cause import Cause
from slurmddp.records.job_events import JobEnded, NodeExcluded
from slurmddp.records.signed import Key
from slurmddp.records.stop import CANCELLED, StopRequest
from slurmddp.supervisor import guard as module
from slurmddp.supervisor import requeue, stopping
from slurmddp.supervisor.brain.types import NEXT, Decision, Ledger, Settings
from slurmddp.supervisor.folder import PATIENCE, Unavailable
from slurmddp.supervisor.guard import Guard, Over
from slurmddp.supervisor.lease import Lease
from slurmddp.supervisor.values import OPTIONAL, Values, read
from tests.helpers import Desk, make_code, supervisor
from tests.unit.supervisor.test_supervisor_folder import python as python

SCONTROL = """#!/bin/bash
[[ "$1" != requeue ]] || echo requeue >>"${0%/*}/asked"
echo "JobId=7 JobState=COMPLETED Reason=WHY Restarts=0 BatchHost=node1 NodeList=node[1-2]"
"""
SBATCH = '#!/bin/bash\necho sbatch >>"${0%/*}/asked"\necho 8\n'
WORDS = {
    "scheduler": "slurm", "own_script": "", "requeue_policy": "requeue", "singleton": "", "must_save": "",
    "preflight": "", "breaker": "3", "stop_lead": "", "cancel_grace": "", "nodes_min": "1", "nodes_max": "2",
    "max_gpu_hours": "", "from_zero": "", "gpus_per_node": "0", "watch": "[]",
    "elastic": "", "python": "",
}  # fmt: skip


class Killed:
    """A run whose job.sh has started, on a node with stand-ins."""

    def __init__(self, desk: Desk, python: str) -> None:
        self.desk, self.python = desk, python
        self.run = desk.root / "run"
        (self.run / "logs" / "attempt-002").mkdir(parents=True)
        make_code(self.run)
        started = {"time": 1, "event": "job_started", "attempt": 0, "job_id": "7", "node": "node1"}
        (self.run / "events.jsonl").write_text(json.dumps(started) + "\n")
        desk.program("sbatch", SBATCH)

    def terminate(
        self, policy: str, why: str, purge: Callable[[], None] = lambda: None, standby: str = ""
    ) -> list[dict[str, Any]]:
        """The events that it writes after the SIGTERM with which Slurm ends a job. purge: called before that."""
        self.desk.program("scontrol", SCONTROL.replace("WHY", why))
        variables = {"SLURMDDP_RUN": str(self.run), "SLURMDDP_ATTEMPT": "0", "SLURMD_NODENAME": "node1"}
        variables |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]", "TMPDIR": str(self.desk.root)}
        given = {"requeue_policy": policy, "python": self.python, "standby": standby}
        values = Values(str(self.run), "", {**WORDS, **given}, (), ())
        code, name = values.program("guard")[-2:]
        words = supervisor(name, self.python, code)  # this Python, not that of the machine
        process = subprocess.Popen([*words, *values.write()], env={**self.desk.environment, **variables})
        status = Path(f"/proc/{process.pid}/status")
        while not int(re.findall(r"SigCgt:\s*(\w+)", status.read_text())[0], 16) >> (signal.SIGTERM - 1) & 1:
            assert process.poll() is None
            time.sleep(0.02)
        purge()
        while process.poll() is None:  # one that comes before it is ready says nothing, those after the first neither
            process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
        assert process.wait(30) in (0, -signal.SIGTERM)  # at its very end, Python lets go of its handlers
        return [json.loads(line) for line in (self.run / "events.jsonl").read_text().splitlines()[1:]]

    @property
    def asked(self) -> str:
        path = self.desk.bin / "asked"
        return path.read_text().strip() if path.exists() else ""


@pytest.fixture
def killed(desk: Desk, python: str) -> Killed:
    return Killed(desk, python)


@pytest.mark.parametrize(
    ("policy", "asked", "decision"),
    [("requeue", "requeue", "requeue"), ("chain", "sbatch", "requeue"), ("none", "", "failed")],
)
def test_a_killed_job_sh_is_brought_back_where_the_policy_allows(
    killed: Killed, policy: str, asked: str, decision: str
) -> None:
    events = killed.terminate(policy, "RaisedSignal:9(Killed)")
    assert killed.asked == asked
    assert events[0]["event"] == "attempt_ended" and events[0]["exit_code"] == 137
    assert (events[0]["cause"], events[0]["node"]) == ("job.sh was killed by SIGKILL (out of memory?)", "node1")
    assert events[-1]["event"] == "job_ended" and events[-1]["decision"] == decision
    assert {row["attempt"] for row in events} == {2}  # the newest that has a folder
    next_jobs = [row["next_job"] for row in events if row["event"] == "requeued"]
    assert next_jobs == {"requeue": ["7"], "chain": ["8"]}.get(policy, [])


@pytest.mark.parametrize(("leader", "back"), [("node1", True), ("node2", False)])
def test_a_killed_job_sh_that_did_not_lead_any_more_is_not_brought_back(
    killed: Killed, leader: str, back: bool
) -> None:
    (killed.run / "lease").mkdir()
    (killed.run / "lease" / f"3.50.aa.{leader}").touch()
    events = killed.terminate("requeue", "RaisedSignal:9(Killed)", standby="yes node2")
    assert (killed.asked, bool(events)) == (("requeue", True) if back else ("", False))
    (lease,) = (path.name for path in (killed.run / "lease").iterdir())
    assert lease.startswith("4." if back else "3.50.") and lease.endswith(leader)


def test_slurm_22_says_it_in_other_words(killed: Killed) -> None:
    assert killed.terminate("requeue", "JobLaunchFailure ExitCode=0:9 ")[-1]["decision"] == "requeue"


def test_any_other_end_is_not_its_own(killed: Killed) -> None:
    """Slurm sends SIGTERM at every end of a job, also after job.sh's own."""
    assert killed.terminate("requeue", "NonZeroExitCode") == [] and killed.asked == ""


def test_a_job_sh_that_has_written_its_end_is_left_alone(killed: Killed) -> None:
    with (killed.run / "events.jsonl").open("a") as file:
        file.write('{"event": "requeued", "job_id": "7"}\n{"event": "checkpoint_saved"}\n')
    assert killed.terminate("requeue", "RaisedSignal:9")[2:] == [] and killed.asked == ""


@pytest.mark.parametrize(("state", "decision"), [("done", "done"), ("failed", "failed"), ("stopped", "requeue")])
def test_a_run_that_was_over_is_not_brought_back(killed: Killed, state: str, decision: str) -> None:
    """stopped: its ranks got Slurm's SIGTERM, too, and saved."""
    (killed.run / "markers").mkdir()
    text = json.dumps({"state": state, "attempt": 2, "reason": "SIGTERM"}, indent=2)
    (killed.run / "markers" / "attempt-002.json").write_text(text)
    events = killed.terminate("requeue", "RaisedSignal:9")
    assert events[-1]["decision"] == decision and bool(killed.asked) == (decision == "requeue")


def test_what_the_user_has_cancelled_stays_out(killed: Killed) -> None:
    (killed.run / "stop").write_text(StopRequest(CANCELLED).text())
    assert killed.terminate("requeue", "RaisedSignal:9")[-1]["decision"] == "cancelled" and killed.asked == ""


def test_the_third_start_without_progress_is_the_last(killed: Killed) -> None:
    (killed.run / "failures").write_text("0 0\n1 0\n")
    assert killed.terminate("requeue", "RaisedSignal:9")[-1]["decision"] == "failed" and killed.asked == ""
    assert (killed.run / "failures").read_text() == "0 0\n1 0\n2 0\n"


@pytest.mark.parametrize(("hours", "decision"), [(2, "stopped"), (2.1, "requeue")])
def test_gpu_hours_count_for_it_too(
    killed: Killed, hours: float, decision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(WORDS, "max_gpu_hours", str(hours))
    (killed.run / "ledger.json").write_text(json.dumps({"gpu_seconds": 7200.0}))
    events = killed.terminate("requeue", "RaisedSignal:9")
    assert events[-1]["decision"] == decision and killed.asked == ("" if decision == "stopped" else "requeue")
    assert (events[0].get("more") == USED) is (events[0].get("not_requeued") == USED) is (decision == "stopped")


def test_a_purged_copy_of_the_code_stops_it_not(killed: Killed) -> None:
    """It has loaded its modules."""
    events = killed.terminate("requeue", "RaisedSignal:9", (killed.run / "code" / "slurmddp.zip").unlink)
    assert events[-1]["decision"] == "requeue" and killed.asked == "requeue"


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_it_sends_heartbeats_with_a_key_that_is_secret(
    killed: Killed, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = killed.run / "rendezvous.key"
    key.write_bytes(b"k" * 32)
    key.chmod(mode)
    received: list[bytes] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind(("127.0.0.1", 0))
        receiver.settimeout(30 if mode == 0o600 else 2)
        monkeypatch.setitem(WORDS, "heartbeats", f"localhost {receiver.getsockname()[1]} this-job")

        def receive() -> None:
            with suppress(TimeoutError):
                received.extend(receiver.recv(1000) for _ in range(3))

        assert killed.terminate("requeue", "NonZeroExitCode", receive) == []
    opened = [Key(b"k" * 32).open(data, "heartbeat", "this-job").decode().split() for data in received]
    numbers = [int(number) for number, _ in opened]
    assert numbers == sorted(set(numbers)) and [node for _, node in opened] == ["node1"] * (3 if mode == 0o600 else 0)


def test_the_arguments_of_the_supervisor_are_handed_on() -> None:
    words = dict.fromkeys(OPTIONAL, "") | {"a": "", "b": "c=d"}
    values = Values("/run", "/tmp/x", words, ("--exact",), ("-n", "2"))
    assert read(values.write()) == values


# --- the node of job.sh is lost


class World:
    """A job of three nodes; this guard's is node2. The clock stands still, unless somebody rests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, report: str, policy: str = "requeue") -> None:
        self.seconds = 0.0
        self.beat: Any = [1, 1]
        self.reports = [report]
        self.did: list[Any] = []
        self.back, self.cancelled = True, False
        self.ledger: Ledger | None = Ledger(best=7)
        answers = {"heartbeat": lambda: self.beat, "newest_attempt": lambda: 4, "marker": lambda: None}
        self.job: Any = SimpleNamespace(
            attempt=0,
            settings=Settings("/run", requeue_policy=policy),
            values=SimpleNamespace(yes=lambda name: name == "elastic"),
            loop=SimpleNamespace(rest=self.rest, be_deaf=lambda: None),
            folder=SimpleNamespace(known=lambda _, name, *__: answers[name](), settle=lambda _: None),
            messages=SimpleNamespace(settle=lambda _: None),
            watch=SimpleNamespace(ledger=Ledger()),
            read_ledger=self.read_ledger,
            send=lambda alert: self.did.append((alert.state, alert.cause.line())),
            cancelled=lambda: self.cancelled,
            event=self.did.append,
            exclude=lambda reason, nodes, note: self.did.extend(note(node, reason) for node in nodes),
            alert=lambda *words: self.did.append(words),
            scheduler=SimpleNamespace(
                host="node2",
                slurm_job="7",
                ask=lambda: None,
                report=lambda: self.reports.pop(0) if len(self.reports) > 1 else self.reports[0],
                names=lambda text: text.split(","),
                withdraw=lambda: self.did.append("withdrawn"),
            ),
        )
        monkeypatch.setattr(module, "put_back", self.put_back)
        self.guard = Guard(self.job, lambda: self.seconds)

    def rest(self, seconds: float) -> None:
        self.seconds += seconds

    def read_ledger(self, patience: float) -> Ledger:
        assert patience <= PATIENCE, "Slurm's KillWait may run"
        if self.ledger is None:
            raise Unavailable("/run does not answer")
        return self.ledger

    def put_back(self, job: Any, cause: Any, ended_by: str = "", *, seconds: float) -> bool:
        self.seconds_left = seconds
        self.did.append(("put back", cause.line()))
        return self.back

    def over(self) -> bool:
        """Look for the job; return whether the guard has nothing more to do."""
        try:
            self.guard.look_for_job()
        except Over:
            return True
        return False


LOST = "JobId=7 JobState=RUNNING Reason=None BatchHost=node1 NodeList="
EXCLUDED = NodeExcluded("node1", "Slurm lost the node, which ran job.sh")
BACK = ("put back", "node1: Slurm lost the node, which ran job.sh")


def test_a_heartbeat_counts_as_silent_by_this_nodes_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, "")
    found = []
    for seconds, beat in ((5, [1, 1]), (25, [1, 1]), (36, [1, 1]), (37, [2, 1]), (40, None), (71, None)):
        world.seconds, world.beat = seconds, beat
        found.append(world.guard.silent())
    assert found == [False, False, True, False, False, True]  # a folder that does not answer: Slurm decides


@pytest.mark.parametrize(
    ("policy", "back", "then"),
    [
        ("requeue", True, []),
        ("chain", True, ["withdrawn"]),
        (
            "none",
            False,
            [
                ("failed", "failed", Cause(EXCLUDED.reason, node="node1"), module.LOST_FOR_GOOD),
                "withdrawn",
            ],
        ),
    ],
)
def test_the_first_node_that_is_left_brings_the_job_back(
    monkeypatch: pytest.MonkeyPatch, policy: str, back: bool, then: list[Any]
) -> None:
    world = World(monkeypatch, LOST + "node2,node3", policy)
    world.back = back
    assert world.over() and world.seconds == 0
    assert world.did == [EXCLUDED, BACK, *then]
    assert (world.job.attempt, world.job.messages.attempt, world.job.watch.ledger) == (4, 4, world.ledger)


@pytest.mark.parametrize(("why", "back"), [("RaisedSignal:9(Killed)", True), ("None", False)])
def test_a_successor_brings_the_job_back_where_slurm_kills_job_sh(
    monkeypatch: pytest.MonkeyPatch, why: str, back: bool
) -> None:
    """Its node was cut off, and came back: Slurm takes the end of the script that it killed there for the job's."""
    world = World(monkeypatch, f"JobId=7 JobState=COMPLETING Reason={why} BatchHost=node1 NodeList=node2")
    started = {"event": "job_started", "nodes": "node[1-3]", "job_id": "7"}
    world.job.folder.known = lambda *_, **__: started
    monkeypatch.setattr(Guard, "bring_back", lambda guard: world.did.append("brought back"))
    world.guard.end_with_script()
    assert world.did == [], "it is the guard of another node, and does not lead"
    world.guard.leads = True
    with suppress(Over):
        world.guard.end_with_script()
        world.did.append("terminated, as ever")
    assert world.did == (["brought back"] if back else ["terminated, as ever"])


@pytest.mark.parametrize("takes", [True, False])
def test_with_a_successor_the_job_is_brought_back_by_who_takes_the_lease(
    monkeypatch: pytest.MonkeyPatch, takes: bool
) -> None:
    world = World(monkeypatch, LOST + "node2,node3")
    world.guard.standby = SimpleNamespace(take=lambda: takes)  # type: ignore[assignment]
    assert world.over() is takes and world.did == ([EXCLUDED, BACK] if takes else [])


@pytest.mark.parametrize(
    ("lost", "may", "takes", "over", "asked"),
    [
        (True, True, True, False, ["may", "take", "succeed node1"]), (True, True, False, False, ["may", "take"]),
        (True, False, True, False, ["may"]), (False, True, True, False, []), (True, True, True, True, []),
    ],
)  # fmt: skip
def test_a_guard_succeeds_a_lost_leader(
    monkeypatch: pytest.MonkeyPatch, lost: bool, may: bool, takes: bool, over: bool, asked: list[str]
) -> None:
    world, did = World(monkeypatch, ""), []  # type: World, list[str]
    monkeypatch.setattr(module, "succeed", lambda job, host, killed: did.append(f"succeed {host}"))
    standby: Any = SimpleNamespace(
        lost=lambda: lost, is_over=lambda: over, seen=Lease(1, 2, "aa.node1"),
        may_succeed=lambda: did.append("may") or may, take=lambda: did.append("take") or takes,
    )  # fmt: skip
    with suppress(Over):
        world.guard.succeed(standby)
        did.append("goes on")
    ends = over or "succeed node1" in asked
    assert did == (asked if ends else [*asked, "goes on"])


USED = "the run has used 2.0 GPU hours, and recovery.max_gpu_hours is 2"


def test_a_run_that_has_used_its_gpu_hours_is_not_brought_back(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, LOST + "node2,node3")
    world.job.settings = world.job.settings._replace(max_gpu_hours=2.0)
    world.ledger = Ledger(gpu_seconds=7200.0)
    assert world.over()
    ended = JobEnded(137, "KILL", "NODE_FAIL", "", "stopped")
    assert world.did == [EXCLUDED, ended, ("stopped", f"{BACK[1]}; {USED}"), "withdrawn"]
    world = World(monkeypatch, LOST + "node2,node3")
    world.job.settings, world.ledger = world.job.settings._replace(max_gpu_hours=2.0), Ledger(gpu_seconds=7199.0)
    assert world.over() and world.did == [EXCLUDED, BACK]


def test_the_others_wait_longer_than_one_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else two of them bring the job back: with `chain`, it would run twice."""
    world = World(monkeypatch, LOST + "node2,node3")
    assert world.over() and world.seconds_left + 2 * PATIENCE + requeue._TRY < module._TURN


def test_a_killed_job_sh_is_brought_back_within_what_slurm_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds that the questions before it have taken are gone."""
    world = World(monkeypatch, "")
    world.job.stop_file, world.job.scheduler.job = lambda: None, None
    monkeypatch.setattr(module, "decide_by", lambda job, facts: Decision(NEXT, facts.noted, Ledger()))
    monkeypatch.setattr(world.guard, "script_was_killed", lambda: world.rest(7) is None)
    world.rest(1000)
    with pytest.raises(Over):
        world.guard.terminated()
    assert world.seconds_left == stopping.KILL_WAIT - 7 and stopping.KILL_WAIT < 30


def test_a_ledger_that_cannot_be_read_keeps_no_job_out(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, LOST + "node2,node3")
    world.ledger = None
    assert world.over() and world.did == [EXCLUDED, BACK] and world.job.watch.ledger == Ledger()


def test_in_an_outage_slurm_is_asked_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, "")
    asked = []
    for _ in range(60):
        world.rest(10)
        if world.guard.silent() and world.guard.may_ask():
            asked.append(world.seconds)
    assert [later - before for before, later in itertools.pairwise(asked)][:6] == [10, 20, 40, 60, 60, 60]
    world.beat = [2, 1]
    assert not world.guard.silent()
    world.rest(31)
    assert world.guard.silent() and world.guard.may_ask(), "the next outage is another one"


def test_the_others_wait_for_it_and_act_if_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, LOST + "node0,node2,node3")
    assert world.over() and world.seconds == 120 and world.did[:2] == [EXCLUDED, BACK]
    world = World(monkeypatch, LOST + "node0,node2,node3")
    world.reports.append("JobId=7 JobState=PENDING Reason=BeginTime BatchHost=node1")
    assert world.over() and world.seconds == 120 and world.did == []


@pytest.mark.parametrize(
    ("report", "over"),
    [
        ("slurm_load_jobs error: Invalid job id specified", True),
        ("JobId=7 JobState=COMPLETED BatchHost=node1 NodeList=node2", True),
        (LOST + "node3", True),  # this node was cut off
        (LOST + "node1,node2", False),  # the node of job.sh is there
        ("JobId=7 JobState=SUSPENDED BatchHost=node1 NodeList=node2", False),
        ("", False),  # nobody answers
    ],
)
def test_it_acts_on_nothing_else(monkeypatch: pytest.MonkeyPatch, report: str, over: bool) -> None:
    world = World(monkeypatch, report)
    assert world.over() is over and world.did == []


def test_a_cancelled_job_is_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, LOST + "node2")
    world.cancelled = True
    assert world.over()
    assert world.did == [JobEnded(137, "KILL", "NODE_FAIL", "", "cancelled"), "withdrawn"]
