"""guard.sh with stand-ins for Slurm: what it does about a job whose job.sh was killed, for each requeue policy."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import SHELL, Desk, make_code

SCONTROL = """#!/bin/bash
[[ "$1" != requeue ]] || echo requeue >>"${0%/*}/asked"
echo "JobId=7 JobState=COMPLETED Reason=WHY Restarts=0 BatchHost=node1 NodeList=node[1-2]"
"""
SBATCH = '#!/bin/bash\necho sbatch >>"${0%/*}/asked"\necho 8\n'


class Guard:
    """A run whose job.sh has started, on a node with stand-ins."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.run = desk.root / "run"
        (self.run / "logs" / "attempt-002").mkdir(parents=True)
        make_code(self.run)
        started = {"time": 1, "event": "job_started", "attempt": 0, "job_id": "7", "node": "node1"}
        (self.run / "events.jsonl").write_text(json.dumps(started) + "\n")
        desk.program("sbatch", SBATCH)

    def terminate(self, policy: str, why: str) -> list[dict[str, Any]]:
        """The events that it writes after the SIGTERM with which Slurm ends a job."""
        self.desk.program("scontrol", SCONTROL.replace("WHY", why))
        self.desk.program("sleep", '#!/bin/bash\n: >"${0%/*}/waiting"\nexec /bin/sleep "$@"\n')
        variables = {"SLURMDDP_RUN": str(self.run), "SLURMDDP_ATTEMPT": "0", "SLURMD_NODENAME": "node1"}
        environment = {**self.desk.environment, **variables, "SLURM_JOB_ID": "7"}
        command = ["bash", str(SHELL / "guard.sh"), policy, "3", ""]
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        while not (self.desk.bin / "waiting").exists() and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        return [json.loads(line) for line in (self.run / "events.jsonl").read_text().splitlines()[1:]]

    @property
    def asked(self) -> str:
        path = self.desk.bin / "asked"
        return path.read_text().strip() if path.exists() else ""


@pytest.fixture
def guard(desk: Desk) -> Guard:
    return Guard(desk)


@pytest.mark.parametrize(
    ("policy", "asked", "decision"),
    [("requeue", "requeue", "requeue"), ("chain", "sbatch", "requeue"), ("none", "", "failed")],
)
def test_a_killed_job_sh_is_brought_back_where_the_policy_allows(
    guard: Guard, policy: str, asked: str, decision: str
) -> None:
    events = guard.terminate(policy, "RaisedSignal:9")
    assert guard.asked == asked
    assert events[0]["event"] == "attempt_ended" and events[0]["exit_code"] == 137
    assert events[-1]["event"] == "job_ended" and events[-1]["decision"] == decision
    assert {row["attempt"] for row in events} == {2}  # the newest that has a folder
    assert [row["next_job"] for row in events if row["event"] == "requeued"] == {"requeue": ["7"], "chain": ["8"]}.get(
        policy, []
    )


def test_slurm_22_says_it_in_other_words(guard: Guard) -> None:
    assert guard.terminate("requeue", "JobLaunchFailure ExitCode=0:9 ")[-1]["decision"] == "requeue"


def test_any_other_end_is_not_its_own(guard: Guard) -> None:
    """Slurm sends SIGTERM at every end of a job, also after job.sh's own."""
    assert guard.terminate("requeue", "NonZeroExitCode") == [] and guard.asked == ""


@pytest.mark.parametrize(("state", "decision"), [("done", "done"), ("failed", "failed")])
def test_a_run_that_was_over_is_not_brought_back(guard: Guard, state: str, decision: str) -> None:
    (guard.run / "markers").mkdir()
    text = json.dumps({"state": state, "attempt": 2}, indent=2)
    (guard.run / "markers" / "attempt-002.json").write_text(text)
    assert guard.terminate("requeue", "RaisedSignal:9")[-1]["decision"] == decision and guard.asked == ""


def test_the_third_start_without_progress_is_the_last(guard: Guard) -> None:
    (guard.run / "failures").write_text("0 0\n1 0\n")
    assert guard.terminate("requeue", "RaisedSignal:9")[-1]["decision"] == "failed" and guard.asked == ""


def test_without_its_functions_it_exits(guard: Guard) -> None:
    """The job itself continues."""
    shell = Path(guard.run / "code" / "slurmddp" / "shell")
    shell.unlink()
    environment = {**guard.desk.environment, "SLURMDDP_RUN": str(guard.run), "SLURMDDP_ATTEMPT": "0"}
    environment |= {"SLURMD_NODENAME": "node1", "SLURM_JOB_ID": "7"}
    command = ["bash", str(SHELL / "guard.sh"), "requeue", "3", ""]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 1 and "messages.sh" in done.stderr
