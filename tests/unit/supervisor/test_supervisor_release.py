"""The hold on a requeued job is ended where that is safe: Slurm is played."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from slurmddp.supervisor import release
from slurmddp.supervisor.loop import Loop
from slurmddp.supervisor.release import Release, Request
from slurmddp.supervisor.requeue import Requeue

CLEAN = "NodeName=n1 Arch=x State=IDLE CPUs=1\nNodeName=n2 Arch=x State=MIXED+PLANNED CPUs=1\n"
FAILED = "JobState=PENDING Reason=launch_failed_requeued_held Restarts=1 ExcNodeList=(null)"

EVENT = {"event": "hold_released", "attempt": 3, "job_id": "7", "node": "n1"}


class Played:
    """Slurm, and what was changed. job, steps, nodes: its answers; None: it gives none."""

    def __init__(self, tmp_path: Path, *excluded: str) -> None:
        self.events, self.changes = tmp_path / "events.jsonl", []
        self.job: str = "JobState=RUNNING Restarts=0"
        self.steps: str | None = ""
        self.nodes: str | None = CLEAN
        self.release = Release(Request("7", 0, list(excluded), "n[1-2]", str(self.events), EVENT))

    def ask(self, *words: str) -> str | None:
        if words[:3] == ("scontrol", "show", "job"):
            return self.job
        if words[:3] == ("scontrol", "show", "node"):
            return self.nodes
        if words[0] == "squeue":
            return self.steps
        self.changes.append(" ".join(words[1:]).replace("update JobId=7 ", ""))
        return ""

    def look(self, times: int = 1, seconds: float = 0) -> list[str]:
        for _ in range(times):
            self.release.look(seconds)
        changes, self.changes = self.changes, []
        return changes


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Played:
    made = Played(tmp_path, "n9")
    monkeypatch.setattr(release, "ask", made.ask)
    return made


#: As Slurm 24.11 shows a job that `scontrol requeue` has ended: already one restart, and the times of the start before.
ENDING = "JobState=COMPLETING Reason=None Restarts=1 EligibleTime=2026-11-26T22:59:33 ExcNodeList=(null)"


def held(seconds: float = 120) -> str:
    begin = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + seconds))
    return f"JobState=PENDING Reason=BeginTime Restarts=1 EligibleTime={begin} ExcNodeList=n8"


def test_a_hold_ends_in_its_third_second_without_the_excluded_nodes(played: Played) -> None:
    assert played.look(9) == [], "it was not requeued yet"
    played.job = held()
    assert played.look(2) == []
    assert played.look() == ["ExcNodeList=n9,n8", "StartTime=now"]
    assert played.look(5) == [], "once"
    (line,) = played.events.read_text().splitlines()
    assert EVENT.items() <= json.loads(line).items()
    played.job = "JobState=RUNNING Restarts=1"
    assert played.look(2) == [] and not played.release.over
    assert played.look() == [] and played.release.over


@pytest.mark.parametrize(
    ("steps", "nodes"),
    [
        ("7.3", CLEAN),
        (None, CLEAN),
        ("", None),
        ("", CLEAN.replace("MIXED", "MIXED+COMPLETING")),
    ],
    ids=["a step lives", "no answer about steps", "no answer about nodes", "a node cleans up"],
)
def test_a_job_whose_steps_may_live_is_not_started(played: Played, steps: str | None, nodes: str | None) -> None:
    played.job, played.steps, played.nodes = held(), steps, nodes
    assert played.look(20) == []
    played.steps, played.nodes = "", CLEAN
    assert played.look()[-1] == "StartTime=now"


@pytest.mark.parametrize("state", ["DOWN*+COMPLETING", "IDLE*", "DOWN+NOT_RESPONDING", "MIXED+NOT_RESPONDING"])
def test_a_node_that_is_silent_is_kept_out_until_its_processes_have_ended(played: Played, state: str) -> None:
    played.job, played.nodes = held(), CLEAN.replace("IDLE", state)
    assert played.look(3) == ["ExcNodeList=n9,n1,n8", "StartTime=now"]
    played.job = "JobState=PENDING Reason=BadConstraints Restarts=1"
    assert played.look(1, seconds=60) == []
    assert played.look(1, seconds=126) == ["ExcNodeList="] and played.release.over


def test_a_node_in_a_cloud_that_is_switched_off_is_not_silent(played: Played) -> None:
    played.job, played.nodes = held(), CLEAN.replace("IDLE", "IDLE+CLOUD+POWERED_DOWN")
    assert played.look(3) == ["ExcNodeList=n9,n8", "StartTime=now"]


def test_too_few_nodes_without_the_excluded_ones(played: Played) -> None:
    played.job = "JobState=PENDING Reason=ReqNodeNotAvail Restarts=1"
    assert played.look() == ["ExcNodeList="] and played.release.over


def test_a_hold_that_is_older_than_this_process_is_left_to_slurm(played: Played) -> None:
    """The job's node did not answer, is back, and still ends what ran there."""
    played.job = held(60)
    assert played.look(30) == []


def test_the_time_of_the_last_start_is_none_of_the_hold(played: Played) -> None:
    played.job = ENDING
    assert played.look(9) == []
    played.job = held()
    assert played.look(2) == [] and "StartTime=now" in played.look()[-1]


def test_a_hold_that_slurm_does_not_end_is_not_told_of(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    played.job = held()
    refuses = {"update"}
    monkeypatch.setattr(release, "ask", lambda *words: None if words[1] in refuses else played.ask(*words))
    played.look(5)
    assert not played.events.exists() and not played.release.released
    refuses.clear()
    assert "StartTime=now" in played.look() and len(played.events.read_text().splitlines()) == 1


def test_a_job_that_a_node_refused_is_released_twice_at_most(played: Played) -> None:
    played.job, played.steps = FAILED, "7.batch"
    assert played.look(5) == []
    played.steps = ""
    assert played.look() == ["ExcNodeList=n9", "release 7"]
    assert played.look(5) == ["ExcNodeList=n9", "release 7"]
    assert "hold_released" in played.events.read_text()


def test_a_job_that_has_ended_needs_nobody(played: Played) -> None:
    played.job = "JobState=CANCELLED Restarts=1"
    assert played.look() == [] and played.release.over


def test_it_asks_less_and_less_often(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the last change on, and for nodes only where no step lives: many jobs may be requeued at once."""
    asked: list[str] = []

    def ask(*words: str) -> str | None:
        asked.append(" ".join(words[:3]))
        return played.ask(*words)

    monkeypatch.setattr(release, "ask", ask)

    def pauses(count: int) -> list[int]:
        found = []
        for _ in range(count):
            assert played.look() == []
            found.append(played.release.pause())
        return found

    assert pauses(7) == [1, 1, 2, 4, 8, 15, 15]
    played.job, played.steps = held(), "7.0"
    assert pauses(7) == [1, 1, 2, 4, 8, 15, 15]
    assert "scontrol show node" not in asked and asked.count("squeue --steps --noheader") == 5
    played.steps = ""
    assert played.look()[-1] == "StartTime=now" and "scontrol show node" in asked
    played.job = "JobState=RUNNING Restarts=1"
    assert pauses(2) == [5, 5], "a node may refuse it within seconds"


@pytest.mark.parametrize("whose", ["folder", "file"])
def test_nothing_is_written_to_what_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whose: str) -> None:
    other, events = tmp_path / "other", tmp_path / "run/events.jsonl"
    events.parent.mkdir()
    if whose == "file":
        other.touch()
        events.symlink_to(other)
        with pytest.raises(OSError):
            release.append(str(events), "x\n")
        assert other.read_text() == ""
        return
    release.append(str(events), "x\n")
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    release.append(str(events), "y\n")
    assert events.read_text() == "x\n"


def test_it_can_reach_slurm_and_has_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where slurm.conf is, who serves it, and the token: none of them as an argument, which `ps` shows to all."""
    seen = tmp_path / "seen"
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/bash\nenv >{seen}.part\nmv {seen}.part {seen}\necho JobState=COMPLETED\n")
    scontrol.chmod(0o755)
    kept = {"SLURM_CONF": "/a", "SLURM_CONF_SERVER": "b", "SLURM_JWT": "c", "HOME": "/home/alice"}
    of_job = {"SLURM_RESTART_COUNT": "2", "SLURM_NNODES": "3"}
    for name, text in {"PATH": f"{tmp_path}:{os.environ['PATH']}", **of_job, **kept}.items():
        monkeypatch.setenv(name, text)
    Requeue(Loop(), "7", "7", "n1", str(tmp_path)).by_others(["n2"])
    end = time.monotonic() + 30
    while not seen.exists() and time.monotonic() < end:
        time.sleep(0.1)
    got = dict(line.split("=", 1) for line in seen.read_text().splitlines() if "=" in line)
    assert {name: got.get(name) for name in kept} == kept
    assert not [name for name in got if name.startswith("SLURM_") and name not in kept]
