"""What an attempt does before its ranks start, and what it reads while they run."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from slurmddp.records.events import Event
from slurmddp.records.job_events import JobStarted
from slurmddp.supervisor import attempt, watching
from slurmddp.supervisor.attempt import Attempts
from slurmddp.supervisor.brain.types import (
    Around,
    AskEndTime,
    AskToStop,
    FindCause,
    Kill,
    Say,
    Settings,
    Terminate,
    Write,
)
from slurmddp.supervisor.logs import Logs
from slurmddp.supervisor.watching import Watching


class Stage:
    """An attempt whose checks answer what a test says; `did` has what was done, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
        self.did: list[str] = []
        self.ends = changes.get("ends", False)
        answers = {"check_nodes": True, "measure_network": True, "choose_save": True, **changes}
        for name in ("check_nodes", "measure_network", "choose_save"):
            monkeypatch.setattr(attempt, name, self.step(name, answers[name]))
        values = {"measure": "yes", "tasks_per_node": changes.get("tasks")}
        self.job: Any = SimpleNamespace(
            settings=Settings("/run", preflight=changes.get("preflight", "yes")),
            must_end=lambda: self.ends,
            nodes=SimpleNamespace(choose=lambda: changes.get("enough", True), usable=[], chosen=["n1", "n2"]),
            values=SimpleNamespace(
                yes=lambda name: bool(values.get(name)),
                number=values.get,
                node_script=lambda: ["bash", "node.sh"],
                rank_options=("--mpi=none",),
            ),
            say=lambda text: self.did.append(text.split(":")[0]), decision="", cause=None, exit_code=None,
        )  # fmt: skip
        made: Any = Attempts.__new__(Attempts)
        made.job, made._measured = self.job, []
        made.watching = SimpleNamespace(look=None, new_attempt=lambda: None)
        made.list_nodes = list
        made.decide = lambda: "decided"
        made.record = lambda decision, launched: self.did.append(f"recorded {decision} {launched}")
        made._train = lambda: self.did.append("trained")
        self.attempts = made

    def step(self, name: str, answer: bool) -> Any:
        def run(*_: Any) -> bool:
            self.did.append(name)
            return answer

        return run

    def made(self) -> list[str]:
        self.attempts.make()
        return self.did


@pytest.mark.parametrize(
    ("changes", "did"),
    [
        ({}, ["check_nodes", "measure_network", "choose_save", "trained"]),
        ({"check_nodes": False}, ["check_nodes"]),
        ({"preflight": ""}, ["measure_network", "choose_save", "trained"]),
        ({"measure_network": False}, ["check_nodes", "measure_network", "recorded None False"]),
        ({"choose_save": False}, ["check_nodes", "measure_network", "choose_save", "recorded decided False"]),
        ({"preflight": "only"}, ["check_nodes", "measure_network", "recovery.preflight is only"]),
        ({"ends": True}, ["asked to stop before the ranks started", "recorded decided False"]),
        ({"enough": False}, ["check_nodes"]),
    ],
)
def test_what_comes_before_the_ranks(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], did: list[str]) -> None:
    stage = Stage(monkeypatch, **changes)
    assert stage.made() == did
    expected = {"preflight": ("done", 0), "enough": ("requeue", None), "ends": ("", 0)}
    key = next((name for name in expected if name in changes and changes[name] != ""), None)
    assert (stage.job.decision, stage.job.exit_code) == (expected[key] if key else ("", None))


def test_the_command_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Stage(monkeypatch).attempts._command() == ["bash", "node.sh"]
    tasks = Stage(monkeypatch, tasks=4).attempts._command()
    assert tasks == ["--ntasks=8", "--ntasks-per-node=4", "--mpi=none", "bash", "node.sh"]


def test_what_the_brain_asks_for_is_done() -> None:
    did: list[Any] = []
    child = SimpleNamespace(kill=lambda number: did.append(number.name))
    job: Any = SimpleNamespace(
        say=did.append, event=did.append, child=child, moment=lambda: None, send=did.append,
        scheduler=SimpleNamespace(end_time=lambda: 7.0), find_cause=lambda noted: ("found", noted),
        settings=Settings("/run"), nodes=SimpleNamespace(chosen=["n1"]),
    )  # fmt: skip
    made: Any = Watching.__new__(Watching)
    made._job = job
    made._watch = SimpleNamespace(
        end_time_is=lambda when, _: did.append(("end", when)) or [Say("told")], cause_is=did.append
    )
    asked: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watching, "ask_to_stop", lambda _, reason: asked.append(reason))
        made.carry_out([Say("x"), Write("e"), Terminate(), Kill(), AskToStop("why"), AskEndTime(), FindCause(None)])
    assert did == ["x", "e", "SIGTERM", "SIGKILL", ("end", 7.0), "told", ("found", None)]
    assert asked == ["why"]
    job.child = None
    made.carry_out([Kill()])


def test_a_look_takes_only_what_is_about_the_nodes_of_the_attempt() -> None:
    seen: list[Any] = []
    made: Any = Watching.__new__(Watching)
    made._job = SimpleNamespace(nodes=SimpleNamespace(chosen=["n1"]), moment=lambda: None, events_read=0, attempt=1)
    made._watch = SimpleNamespace(see=lambda event, _: seen.append(event.facts) or [])
    made._around = Around()
    old, line = (json.dumps(Event(JobStarted("n1", None, 0), 5.0, attempt).write()) for attempt in (0, 1))
    found = {
        "events": (9, [old, line, "{damaged"]), "marker": None, "stop": "time limit", "failures": 2,
        "newest_start": 1, "unreached": [["n1", "no route"], ["n7", "excluded"]],
    }  # fmt: skip
    made._read(found)
    assert made._job.events_read == 9 and [type(facts) for facts in seen] == [JobStarted]
    assert made._around == Around(None, "time limit", 1, 2, 0.0, (("n1", "no route"),))


def test_what_the_logs_say_of_an_attempt_that_has_ended(tmp_path: Any) -> None:
    logs = tmp_path / "logs/attempt-000"
    (logs / "preflight").mkdir(parents=True)
    (logs / "srun.err").write_text(
        "srun: a line\nsrun: error: n2: task 1: Killed\nsrun: error: n1: task 0: Exited with exit code 1\n"
    )
    (logs / "n1.log").write_text("Received 15 death signal, shutting down workers\n")
    (logs / "n2.log").write_text("torch.distributed: got signal: 15\nmore")
    for node in ("n3", "n4", "n5"):
        (logs / f"{node}.log").write_text("all is well\n")
    found = Logs(str(tmp_path)).ended(str(logs), ["n1", "n2"])
    assert (found["killed_agents"], found["signalled"], found["unreached"]) == (["n2"], 2, [])
    (logs / "srun.err").write_text("srun: error: n1: task 0: Exited with exit code 1\n")
    assert Logs(str(tmp_path)).ended(str(logs), [])["killed_agents"] == []
