"""The watchdog job: in process with injected answers of Slurm; and once as the program that sbatch starts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from slurmddp.supervisor.files import Files
from slurmddp.supervisor.values import program
from slurmddp.supervisor.watchdog import Watch
from tests.helpers import Desk, make_code, supervisor
from tests.unit.supervisor.test_supervisor_folder import python as python

STARTED = {"event": "job_started", "job_id": "7", "attempt": 3, "node": "node1"}
ENDED = {"event": "job_ended", "job_id": "7", "attempt": 3, "node": "node1"}
REQUEUED = {"event": "requeued", "job_id": "7", "attempt": 3, "node": "node1", "how": "chain", "next_job": "8"}
REQUEUED_HERE = {key: value for key, value in REQUEUED.items() if key != "next_job"}
BACK = {**ENDED, "decision": "requeue"}
OPTIONS = ("--qos=small", "--comment=a b")


class Slurm:
    """Slurm's answers. asked: what else it was asked. rests: seconds between two questions."""

    def __init__(self, report: str, accounting: str = "", sbatch: tuple[int, str] = (0, "9;cluster\n")) -> None:
        self.report, self.accounting, self.sbatch = report, accounting, sbatch
        self.asked: list[list[str]] = []
        self.rests: list[float] = []

    def __call__(self, words: Sequence[str]) -> tuple[int, str]:
        if words[0] == "scontrol":
            return 0, self.report
        if words[0] == "sacct":
            return 0, self.accounting
        self.asked.append(list(words))
        return self.sbatch


def watch(run: Path, slurm: Slurm, *events: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The alert, and the event that the watchdog has written."""
    path = run / "events.jsonl"
    if events:
        path.write_text("".join(json.dumps(event) + "\n" for event in events))
    alert = Watch(str(run), "7", "/opt/python", OPTIONS, "70", slurm, slurm.rests.append).look()
    rows = [json.loads(line) for line in path.read_text().splitlines()][len(events) :]
    (row,) = rows
    assert (row.pop("event"), row.pop("job_id"), row.pop("watchdog")) == ("watchdog", "7", "70") and row.pop("time")
    return alert, row


def report(state: str, more: str = "") -> str:
    return f"JobId=7 JobName=x JobState={state} Reason=None ExitCode=0:9 BatchHost=node2 {more}"


@pytest.mark.parametrize(
    ("text", "accounting", "events", "state", "cause"),
    [
        (report("NODE_FAIL"), "", [STARTED], "NODE_FAIL", "node node2, which ran job.sh, was lost"),
        (
            report("TIMEOUT"), "", [STARTED], "TIMEOUT",
            "the time limit killed it on node node2: job.sh ended without running its traps",
        ),
        (
            report("OUT_OF_MEMORY"), "", [STARTED], "OUT_OF_MEMORY",
            "node node2: out of memory: job.sh ended without running its traps",
        ),
        (
            report("FAILED"), "", [ENDED, STARTED], "FAILED",
            "node node2: job.sh ended without running its traps, exit code 0:9, reason None",
        ),
        (
            "slurm_load_jobs error: Invalid job id specified", "FAILED|0:9\nCANCELLED by 1000|0:0\n", [STARTED],
            "CANCELLED", "node node1: job.sh ended without running its traps, exit code 0:0",
        ),
        ("", "", [STARTED], "unknown to Slurm", "node node1: job.sh ended without running its traps"),
        (report("BOOT_FAIL"), "", [], "BOOT_FAIL", None),
        (
            report("BOOT_FAIL"), "", [STARTED, REQUEUED_HERE, BACK], "BOOT_FAIL",
            "node node2: the job ended while pending, exit code 0:9, reason None",
        ),
    ],
)  # fmt: skip
def test_it_alerts_where_job_sh_could_not(
    tmp_path: Path, text: str, accounting: str, events: list[dict[str, Any]], state: str, cause: str | None
) -> None:
    run = tmp_path / "gpt-1"
    run.mkdir()
    alert, row = watch(run, Slurm(text, accounting), *events)
    assert row == {"outcome": "alerted", "state": "" if state.startswith("unknown") else state}
    assert (alert.kind, alert.state, alert.attempt) == ("failed", state, 3 if events else None)
    assert alert.node == alert.cause.split("node ")[1].split()[0].strip(":,")
    assert alert.cause == (cause or "node node2: the job ended before it started, exit code 0:9, reason None")
    assert alert.next == "not restarted automatically; slurmddp submit --resume gpt-1 continues it"


@pytest.mark.parametrize(
    ("state", "events"),
    [
        ("COMPLETED", [STARTED, ENDED]),
        ("FAILED", [STARTED, ENDED]),
        ("CANCELLED", []),
        ("CANCELLED", [REQUEUED_HERE]),
        ("CANCELLED", [REQUEUED_HERE, BACK]),
        ("COMPLETED", [REQUEUED_HERE, BACK]),
    ],
)
def test_it_is_silent_where_the_end_is_known_or_wanted(
    tmp_path: Path, state: str, events: list[dict[str, Any]]
) -> None:
    alert, row = watch(tmp_path, Slurm(report(state)), *events)
    assert alert is None and row == {"outcome": "no alert", "state": state}


@pytest.mark.parametrize(("answers", "rests"), [(5, 4), (3, 2), (1, 0)])
def test_slurm_is_asked_again_if_it_does_not_answer(tmp_path: Path, answers: int, rests: int) -> None:
    last = {5: "", 3: report("COMPLETED"), 1: "slurm_load_jobs error: Invalid job id specified"}[answers]
    said = iter([*[""] * (answers - 1), last])

    class Busy(Slurm):
        def __call__(self, words: Sequence[str]) -> tuple[int, str]:
            return (1, next(said)) if words[0] == "scontrol" else super().__call__(words)

    slurm = Busy("")
    watch(tmp_path, slurm, STARTED)
    assert slurm.rests == [30.0] * rests and next(said, None) is None


def test_a_disk_that_takes_nothing_does_not_keep_the_alert_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "events.jsonl").write_text(json.dumps(STARTED) + "\n")
    for name in ("say", "write"):
        monkeypatch.setattr(Files, name, full)
    monkeypatch.setattr("slurmddp.records.json_lines.append", full)
    alert = Watch(str(tmp_path), "7", "", OPTIONS, "70", Slurm(report("NODE_FAIL"))).look()
    assert alert is not None and alert.cause == "node node2, which ran job.sh, was lost"
    held = report("PENDING").replace("Reason=None", "Reason=launch_failed_requeued_held")
    alert = Watch(str(tmp_path), "7", "", OPTIONS, "70", Slurm(held)).look()
    assert alert is not None and alert.kind == "warning"
    assert "No space left on device" in capfd.readouterr().err


@pytest.mark.parametrize("state", ["RUNNING", "PENDING", "COMPLETING", "REQUEUE_HOLD", "SPECIAL_EXIT"])
def test_it_waits_for_a_job_that_runs_again(tmp_path: Path, state: str) -> None:
    slurm = Slurm(report(state))
    alert, row = watch(tmp_path, slurm, STARTED)
    assert alert is None and row == {"outcome": "waits", "state": state}
    (words,) = slurm.asked
    assert words[:2] == ["sbatch", "--parsable"] and {*OPTIONS, "--dependency=afterany:7", "--open-mode=append"} < {
        *words
    }
    script = program(str(tmp_path), "/opt/python", "watchdog")
    assert words[words.index(script[0]) :] == [*script, str(tmp_path), "7", "/opt/python", *OPTIONS]


@pytest.mark.parametrize("events", [[STARTED, {**REQUEUED, "next_job": "8"}], [STARTED, {**STARTED, "job_id": "8"}]])
def test_it_follows_a_chain(tmp_path: Path, events: list[dict[str, Any]]) -> None:
    slurm = Slurm(report("COMPLETED"))
    assert watch(tmp_path, slurm, *events)[1]["outcome"] == "waits"
    assert "--dependency=afterany:8" in slurm.asked[0]


def test_a_job_that_slurm_holds_after_a_refused_start_is_told(tmp_path: Path) -> None:
    text = report("PENDING").replace("Reason=None", "Reason=launch_failed_requeued_held")
    alert, row = watch(tmp_path, Slurm(text), STARTED)
    assert row == {"outcome": "waits", "state": "PENDING"}
    assert (alert.kind, alert.next) == ("warning", "`scontrol release 7` lets it start")
    assert alert.cause == "a node refused to start job 7, and Slurm holds it"


def test_a_refused_watchdog_job_is_said(tmp_path: Path) -> None:
    alert, row = watch(tmp_path, Slurm(report("RUNNING"), sbatch=(1, "")), STARTED)
    assert alert is None and row["outcome"] == "not submitted"


def test_as_the_program_it_takes_nothing_of_its_own_job_along(desk: Desk, python: str) -> None:
    """The next job gets the same options and arguments, and none of the variables that Slurm gave this one."""
    run = desk.root / "run"
    make_code(run)
    desk.program("sbatch", '#!/bin/bash\nprintf "%s\\n" "$@" >"${0%/*}/words"\nenv >"${0%/*}/env"\necho 8\n')
    desk.program("scontrol", "#!/bin/bash\necho 'JobId=7 JobState=RUNNING Reason=None'\n")
    (script, _, code, name) = program(str(run), "", "watchdog")
    python = python if python == sys.executable else ""  # else as sbatch starts it: with the machine's Python
    words = supervisor(name, python, code) if python else ["bash", script, "", code, name]
    own = {"SLURM_JOB_ID": "70", "SLURM_MEM_PER_NODE": "1", "SBATCH_ACCOUNT": "x", "SLURM_CONF": "/etc/slurm.conf"}
    command = [*words, str(run), "7", "", *OPTIONS]
    done = subprocess.run(command, env={**desk.environment, **own}, capture_output=True, text=True, check=True)
    assert "job 7: RUNNING (None)" in done.stdout and done.stderr == ""
    assert json.loads((run / "events.jsonl").read_text())["watchdog"] == "70"
    assert (desk.bin / "words").read_text().splitlines()[-len(command) + len(words) :] == command[len(words) :]
    env = (desk.bin / "env").read_text().splitlines()
    assert [line for line in env if line.startswith(("SLURM", "SBATCH"))] == ["SLURM_CONF=/etc/slurm.conf"]


def test_as_the_program_it_sends_the_alert(desk: Desk, python: str) -> None:
    """Here: it leaves it in the spool, as on a site whose nodes reach nobody."""
    run = desk.root / "run"
    (run / "payloads").mkdir(parents=True)
    secrets = desk.root / "config/slurmddp/secrets/run"
    secrets.mkdir(parents=True)
    (run / "payloads" / "json").write_text(
        'on failed 5 x\nleave login\nescape json\nbytes 100\npart {"a": "@cause@"}\n'
    )
    (run / "events.jsonl").write_text(json.dumps(STARTED) + "\n")
    desk.program("scontrol", "#!/bin/bash\necho 'JobId=7 JobState=NODE_FAIL Reason=None BatchHost=node2'\n")
    command = [*supervisor("watchdog", python), str(run), "7", ""]
    env = {**desk.environment, "SLURM_JOB_ID": "70", "XDG_CONFIG_HOME": str(desk.root / "config")}
    subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    (message,) = (run / "alerts" / "spool").iterdir()
    assert message.name == "run.3.failed.json"
    assert json.loads((message / "body").read_text()) == {"a": "node node2, which ran job.sh, was lost"}
    rows = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [(row["event"], row["job_id"]) for row in rows[1:]] == [("watchdog", "7"), ("alert", "7")]
