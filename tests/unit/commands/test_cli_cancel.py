"""`slurmddp cancel`, the hold after a requeue, and jobs that are chained."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest

from slurmddp.cluster.local import job_id_of
from slurmddp.records.stop import CANCELLED, StopRequest
from slurmddp.records.submission import now as submitted_now
from slurmddp.run import submission
from slurmddp.run.events import append_line, read_lines
from slurmddp.run.gate import own
from slurmddp.run.layout import RunFolder
from tests.helpers import Desk, Result, append_event, node_log

Cli = Callable[..., Result]

#: Slurm's commands as far as these tests ask them: a job's line is in HOME/jobs/ID; what they were called with is kept.
SCONTROL = """#!/bin/bash
printf '%s\\n' "scontrol $*" >> "$HOME/calls"
case "$*" in
  *"show job"*) [[ ! -e $HOME/meanwhile ]] || source "$HOME/meanwhile"
    cat "$HOME/jobs/${!#}" 2>/dev/null || { echo "Invalid job id specified" >&2; exit 1; } ;;
  *"show node"*) cat "$HOME/nodes" ;;
  *update*) [[ ! -e $HOME/refuse ]] || { echo "Access/permission denied" >&2; exit 1; } ;;
esac
"""
SCANCEL = """#!/bin/bash
printf '%s\\n' "scancel $*" >> "$HOME/calls"
[[ -e "$HOME/jobs/${!#}" ]] || echo "scancel: error: Kill job error on job id ${!#}: Invalid job id specified" >&2
"""


class Place:
    """A submitted run, and what the scheduler is to say of its jobs."""

    def __init__(self, desk: Desk) -> None:
        self.desk, self.home = desk, desk.home
        self.run = RunFolder(desk.project / "runs" / "gpt-1")
        for folder in (self.run.logs, self.run.markers, self.home / "jobs", self.home / ".local/state/slurmddp"):
            folder.mkdir(parents=True)
        self.run.manifest.write_text(
            json.dumps({"run": "gpt-1", "name": "gpt", "created": "2026-01-01T00:00:00+00:00"})
        )
        self.sent("7", "slurm")
        desk.program("scontrol", SCONTROL)
        desk.program("scancel", SCANCEL)

    def sent(self, job_id: str, scheduler: str) -> None:
        submission.write(own(self.run, to="write"), submitted_now(job_id, scheduler, ("sbatch",)))

    def job(self, job_id: str, state: str, reason: str = "None", **fields: Any) -> None:
        words = " ".join(f"{name}={value}" for name, value in fields.items())
        text = f"JobId={job_id} JobName=gpt UserId=alice(1001) JobState={state} Reason={reason} {words}\n"
        (self.home / "jobs" / job_id).write_text(text)

    def event(self, name: str, **fields: Any) -> None:
        append_event(self.run.events, name, **fields)

    def started(self, job_id: str = "7", attempt: int = 0) -> None:
        self.event("job_started", attempt=attempt, job_id=job_id, node="n1", nodes="n[1-2]")

    @property
    def calls(self) -> list[str]:
        """What changed something."""
        path = self.home / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if "show job" not in line and "show node" not in line]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in read_lines(self.run.events).records if event["event"] == name]


@pytest.fixture
def place(desk: Desk) -> Place:
    return Place(desk)


# --- cancel


def test_a_job_that_runs_is_asked_to_save(place: Place, cli: Cli) -> None:
    place.job("7", "RUNNING", NodeList="n1")
    place.started()
    done = cli("cancel", str(place.run.path))
    assert done.code == 0, done.err
    assert done.out.splitlines()[0] == "Job 7 is saving and will exit. It will not be requeued."
    assert "slurmddp cancel gpt-1 --now" in done.out
    assert place.run.stop.read_text() == StopRequest(CANCELLED).text()
    assert place.calls == []
    (told,) = place.events("cancel_requested")
    assert (told["job_id"], told["now"]) == ("7", False)
    assert "stopping on n1" in cli("status", str(place.run.path)).out


def test_an_older_wish_to_stop_becomes_final(place: Place, cli: Cli) -> None:
    place.job("7", "RUNNING")
    place.started()
    place.run.stop.write_text(StopRequest("time limit").text())
    cli("cancel", str(place.run.path))
    assert place.run.stop.read_text() == StopRequest(CANCELLED).text()
    assert [path.name for path in place.run.path.iterdir() if path.name.startswith("stop")] == ["stop"]


@pytest.mark.parametrize(
    ("state", "began", "options"),
    [
        ("PENDING", False, ()),
        ("PENDING", True, ()),
        ("CONFIGURING", False, ()),
        ("RUNNING", False, ()),
        ("RUNNING", True, ("--now",)),
    ],
)
def test_what_cannot_save_ends_at_once(
    place: Place, cli: Cli, state: str, began: bool, options: tuple[str, ...]
) -> None:
    place.job("7", state)
    if began:
        place.started()
    done = cli("cancel", str(place.run.path), *options)
    assert done.out == "Cancelled job 7. It will not be requeued.\n"
    assert place.calls == ["scancel --verbose 7"]
    assert place.run.stop.exists() == (began or bool(options)), "what job.sh and the guard see while they are ended"
    assert place.events("cancel_requested")


def test_a_run_folder_that_takes_no_stop_file_does_not_keep_the_job(place: Place, cli: Cli) -> None:
    """As on a full disk: here, a folder has the name."""
    place.job("7", "RUNNING", NodeList="n1")
    place.started()
    place.run.stop.mkdir()
    done = cli("cancel", str(place.run.path), "--now")
    assert done.code == 1 and "stop" in done.err and "Traceback" not in done.err
    assert place.calls == ["scancel --verbose 7"]


def test_an_own_script_gets_a_grace_time(place: Place, cli: Cli) -> None:
    """Nobody knows whether the script looks at the stop file, so nobody says that it saves."""
    place.job("7", "RUNNING", NodeList="n1")
    place.event("job_started", attempt=0, job_id="7", node="n1", cancel_grace=120)
    line = cli("cancel", str(place.run.path)).out.splitlines()[0]
    assert line == "Job 7 has 120 s to save and exit, then its ranks are terminated. It will not be requeued."
    place.event("ranks_terminated", attempt=0, reason="cancelled by the user", waited=120)
    place.event("attempt_ended", attempt=0, exit_code=1, decision="stopped", cause="cancelled by the user")
    place.event("job_ended", attempt=0, exit_code=1)
    (place.home / "jobs/7").unlink()
    state = "cancelled by you, its ranks did not exit within 120 s, so job.sh terminated them"
    assert f"state    {state}" in cli("status", str(place.run.path)).out.splitlines()


def test_a_job_that_has_ended(place: Place, cli: Cli) -> None:
    place.started()
    assert cli("cancel", str(place.run.path)).out == "Job 7 was already over.\n"
    assert cli("cancel", str(place.run.path), "--now").out == "Job 7 was already over.\n"
    assert not place.events("cancel_requested"), "or a run that failed would look cancelled"
    place.event("job_ended", attempt=0, exit_code=1)
    assert "state    failed" in cli("status", str(place.run.path)).out
    place.job("7", "COMPLETING")
    assert "Cancelled job 7." in cli("cancel", str(place.run.path)).out


def test_of_a_chain_all_jobs(place: Place, cli: Cli) -> None:
    place.job("7", "RUNNING")
    place.job("8", "PENDING", "Dependency")
    place.started()
    place.event("requeued", attempt=0, how="chain", next_job="8", reason="time limit")
    done = cli("cancel", "8")  # the number that squeue shows
    assert done.code == 2 and "no run '8'" in done.err, "it is not in the index of this home"
    done = cli("cancel", str(place.run.path))
    assert done.out.splitlines()[:2] == [
        "Cancelled job 8.",
        "Job 7 is saving and will exit. It will not be requeued.",
    ]
    assert place.calls == ["scancel --verbose 8"]
    assert place.run.stop.exists()


def test_a_chained_job_names_its_run(place: Place, cli: Cli) -> None:
    entry = {"id": "gpt-1", "path": str(place.run.path), "created": "2026-01-01T00:00:00+00:00", "name": "gpt"}
    append_line(place.home / ".local/state/slurmddp/runs.jsonl", {**entry, "job_id": "7"})
    place.job("8", "PENDING", "Dependency")
    place.started()
    place.event("requeued", attempt=0, how="chain", next_job="8", reason="time limit")
    told = cli("status", "8")
    assert told.code == 3, told.err
    assert "requeued: Dependency, after time limit" in told.out
    assert "job      8" in told.out


def test_a_step_of_an_allocation(place: Place, cli: Cli) -> None:
    place.sent("7", "allocation")
    place.job("7", "RUNNING")
    place.started()
    refused = cli("cancel", str(place.run.path), "--now")
    assert refused.code == 2 and "runs inside job 7, so --now cannot cancel it" in refused.err
    assert not place.events("cancel_requested")
    assert (
        "Run gpt-1 is saving and will exit. Job 7, inside which it runs, continues."
        in cli("cancel", str(place.run.path)).out
    )
    assert place.run.stop.exists()
    place.event("job_ended", attempt=0, exit_code=0)
    assert cli("cancel", str(place.run.path)).out == "Run gpt-1 was already over.\n"
    assert place.calls == []


def test_what_was_never_submitted(place: Place, cli: Cli) -> None:
    place.run.submission.unlink()
    refused = cli("cancel", str(place.run.path))
    assert refused.code == 2 and "was never submitted" in refused.err


@pytest.fixture
def process(place: Place) -> Iterator[subprocess.Popen[bytes]]:
    """A job of this machine that ends itself, with a marker, when it finds the stop file."""
    marker = json.dumps({"state": "stopped", "step": 5, "steps": 9, "reason": "cancelled by the user"})
    script = f"""
      until [[ -e {place.run.stop} ]]; do sleep 0.05; done
      printf '%s' '{marker}' > {place.run.marker(0)}
    """
    child = subprocess.Popen(["bash", "-c", script], start_new_session=True)
    place.sent(str(job_id_of(child.pid)), "local")
    place.started(f"local-{child.pid}")
    yield child
    child.kill()
    child.wait()


def test_a_run_of_this_machine_is_waited_for(place: Place, cli: Cli, process: subprocess.Popen[bytes]) -> None:
    done = cli("cancel", str(place.run.path), "--wait")
    assert done.code == 0, done.err
    assert done.out.splitlines()[0].startswith(f"Job local-{process.pid}-")
    assert done.out.splitlines()[-1] == "cancelled by you, checkpoint saved, step 5 of 9"
    assert process.wait() == 0


def test_a_run_that_ends_while_slurm_is_asked_is_not_lost(place: Place, cli: Cli) -> None:
    place.started()
    marker = json.dumps({"state": "done", "step": 9, "steps": 9, "reason": ""})
    end = json.dumps({"time": time.time(), "event": "job_ended", "attempt": 0, "job_id": "7", "exit_code": 0})
    lines = (f"echo '{marker}' > {place.run.marker(0)}", f"echo '{end}' >> {place.run.events}", "")
    (place.home / "meanwhile").write_text("\n".join(lines))
    done = cli("status", str(place.run.path))
    assert done.code == 0 and "state    done" in done.out, done.out


def test_a_run_of_this_machine_ends_at_once(place: Place, cli: Cli, process: subprocess.Popen[bytes]) -> None:
    assert "Cancelled job local-" in cli("cancel", str(place.run.path), "--now").out
    assert process.wait() == -15


# --- the hold after a requeue


def held(place: Place, seconds: float = 100, **more: Any) -> None:
    start = datetime.now() + timedelta(seconds=seconds)
    place.job("7", "PENDING", "BeginTime", **{"Restarts": 1, "StartTime": start.strftime("%Y-%m-%dT%H:%M:%S"), **more})
    place.started()
    place.desk.program("squeue", "#!/bin/bash\ncat $HOME/steps\n")
    (place.home / "steps").write_text("")
    (place.home / "nodes").write_text("NodeName=n1 State=IDLE\nNodeName=n2 State=MIXED\n")


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("steps", "7.3\n"),
        ("nodes", "NodeName=n1 State=IDLE+COMPLETING\nNodeName=n2 State=IDLE\n"),
        ("nodes", "NodeName=n1 State=IDLE*\nNodeName=n2 State=IDLE\n"),
        ("steps", None),
        ("nodes", None),
    ],
    ids=["a step lives", "a node cleans up", "a node is silent", "nobody knows the steps", "nobody knows the nodes"],
)
def test_a_hold_stays_while_the_last_start_may_live(place: Place, cli: Cli, file: str, text: str | None) -> None:
    """A node on which a step still ends refuses the new start: Slurm drains it, and holds the job for good."""
    held(place)
    before = (place.home / file).read_text()
    (place.home / file).unlink() if text is None else (place.home / file).write_text(text)
    assert cli("status", str(place.run.path)).code == 3
    assert place.calls == [] and not place.events("hold_released")
    (place.home / file).write_text(before)
    cli("status", str(place.run.path))
    assert place.calls == ["scontrol update JobId=7 StartTime=now"]


def test_the_next_look_ends_the_hold(place: Place, cli: Cli) -> None:
    held(place)
    told = cli("status", str(place.run.path))
    assert told.code == 3, told.err
    assert "note: released the requeued job 7 from its two-minute hold" in told.out
    assert place.calls == ["scontrol update JobId=7 StartTime=now"]
    assert [event["job_id"] for event in place.events("hold_released")] == ["7"]


def test_a_hold_that_stands_is_told(place: Place, cli: Cli) -> None:
    held(place)
    (place.home / "refuse").touch()
    told = cli("status", str(place.run.path))
    assert told.code == 3
    assert "Slurm holds the requeued job until 20" in told.out
    assert "Access/permission denied" in told.out
    assert not place.events("hold_released")


@pytest.mark.skipif(os.getuid() != 0, reason="giving files to another user takes root")
def test_a_hold_of_another_users_run_stays(place: Place, cli: Cli) -> None:
    held(place)
    os.chown(place.run.path, 65534, -1)
    cli("status", str(place.run.path))
    assert place.calls == [] and not place.events("hold_released")


def test_without_a_count_of_restarts_the_event_tells(place: Place, cli: Cli) -> None:
    held(place, Restarts="N/A")
    cli("status", str(place.run.path))
    assert place.calls == []
    place.event("requeued", attempt=0, how="requeue", reason="time limit")
    cli("status", str(place.run.path))
    assert place.calls == ["scontrol update JobId=7 StartTime=now"]


@pytest.mark.parametrize(
    "change",
    [
        lambda place: held(place, seconds=4000),  # somebody chose this time
        lambda place: held(place, seconds=118),  # what job.sh left behind comes first
        lambda place: held(place, seconds=-5),  # ended already: the reason stays for a while
        lambda place: held(place, Restarts=0),  # --begin
        lambda place: held(place, StartTime="Unknown"),
        lambda place: place.job("7", "PENDING", "Priority", Restarts=1),
        lambda place: place.job("7", "RUNNING", "None", Restarts=1),
    ],
)
def test_no_hold_of_a_requeue(place: Place, cli: Cli, change: Callable[[Place], None]) -> None:
    change(place)
    assert cli("status", str(place.run.path)).code == 3
    assert place.calls == []


def test_the_job_of_another_user_is_left_alone(place: Place, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    held(place)
    mine = place.run.path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    assert cli("status", str(place.run.path)).code == 3
    assert place.calls == []


# --- what status says besides


def test_status_of_a_run_that_recovered(place: Place, cli: Cli) -> None:
    place.job("7", "RUNNING", NodeList="n[1,3]")
    now = time.time()
    place.run.job_json.write_text("{}")
    for attempt, begin in ((0, now - 100), (1, now - 50)):
        rank = {"attempt": attempt, "rank": 0, "node": "n1"}
        if attempt == 0:
            place.event("job_started", attempt=0, job_id="7", node="n1", time=begin)
        place.event("attempt_started", attempt=attempt, nodes="n[1,3]", time=begin)
        place.event("rank_started", **rank, seconds=0, time=begin + 1)
        place.event("ready", **rank, step=0, time=begin + 2)
        place.event("first_step", **rank, step=1, time=begin + 10)
        if attempt == 0:
            place.event(
                "attempt_ended", attempt=0, exit_code=1, cause="n2 was lost", decision="next attempt", time=begin + 40
            )
            place.event("node_excluded", attempt=0, excluded="n2", reason="lost", time=begin + 40)
        place.event("preflight", attempt=attempt, bad="", seconds=1, warnings=[f"n{attempt}: slow\x1b"], time=begin)
    (place.run.alert_spool).mkdir(parents=True)
    (place.run.alert_spool / "1.json").write_text("{}")
    (place.run.alert_spool / ".part").write_text("{}")
    lines = cli("status", str(place.run.path)).out.splitlines()
    assert "state    running on n[1,3]" in lines
    assert "recovered once, in 0:00:50" in lines
    assert "without  n2: lost" in lines
    assert [line for line in lines if "warning" in line] == ["warning  n1: slow\\x1b"], "of the newest preflight"
    assert f"alerts   1 undelivered, in {place.run.alert_spool}" in lines
    told = json.loads(cli("status", str(place.run.path), "--json").out)
    assert (told["recovered"], told["excluded"], told["alerts_undelivered"]) == (1, {"n2": "lost"}, 1)
    assert told["warnings"] == ["n1: slow\x1b"]
    assert json.loads(cli("status", str(place.run.path), "--time", "--json").out)["recoveries"][0][
        "seconds"
    ] == pytest.approx(50)


def test_status_shows_the_speed_of_an_own_script(place: Place, cli: Cli) -> None:
    place.job("7", "RUNNING", NodeList="n1")
    place.run.metrics.write_text('{"time": 1.0, "attempt": 0, "step": 40, "steps_per_second": 3.4567}\n')
    lines = cli("status", str(place.run.path)).out.splitlines()
    assert "step     40" in lines and "speed    3.46 steps/s" in lines


def test_status_names_the_rank_that_an_own_script_waits_for(place: Place, cli: Cli) -> None:
    place.job("7", "RUNNING", NodeList="n[1-2]")
    place.started()
    facts = {"ranks": [3], "nodes": ["n2"], "phase": "step", "step": 29, "waited": 131.0, "stacks": "/a/hang-1"}
    place.event("hang_reported", attempt=0, rank=0, **facts)
    line = "hang     rank 3 on n2: hang: no progress in step at step 29 for 131.0 s; stacks in /a/hang-1"
    assert line in cli("status", str(place.run.path)).out.splitlines()
    place.event("hang_over", attempt=0, rank=0, ranks=[3], nodes=["n2"])
    assert "hang" not in cli("status", str(place.run.path)).out


def test_status_report_and_doctor_warn_of_ranks_that_do_not_work_together(place: Place, cli: Cli) -> None:
    place.job("7", "RUNNING", NodeList="n[1-2]")
    place.started()
    node_log(place.run, 0, "n1").parent.mkdir(parents=True)
    node_log(place.run, 0, "n1").write_text("step 1 loss 2.0\n")
    for name in ("rendezvous.key", "job.sh"):
        (place.run.path / name).touch()
    run, rank = str(place.run.path), {"attempt": 0, "rank": 0, "node": "n1"}
    place.event("no_process_group", **rank, world=4, text="each of the 4 ranks trains a model of its own")
    warning = "warning  each of the 4 ranks trains a model of its own"
    assert warning in cli("status", run).out.splitlines()
    assert json.loads(cli("status", run, "--json").out)["warnings"] == [warning.removeprefix("warning  ")]
    page = cli("report", run, "-o", str(place.run.path / "page.html"))
    assert page.code == 0 and warning.removeprefix("warning  ") in (place.run.path / "page.html").read_text()
    note = f"note: {warning.removeprefix('warning  ')}"
    assert note in cli("doctor", run).out.splitlines()
    place.event("process_group_made", **rank)
    assert "warning" not in cli("status", run).out and note not in cli("doctor", run).out
    place.event("no_process_group", **rank, world=4, text="each of the 4 ranks trains a model of its own")
    place.event("job_ended", attempt=0, node="n1", exit_code=0, decision="done", signal="")
    assert note in cli("doctor", run).out.splitlines(), "a run that is done may have trained in vain"
    place.event("rank_started", **rank)
    assert "warning" not in cli("status", run).out, "of an earlier start"


def test_status_says_what_a_restarted_script_went_on_from(place: Place, cli: Cli) -> None:
    """Only what went on has recovered."""
    place.job("7", "RUNNING", NodeList="n[1-2]")
    place.started()
    rank, now = {"attempt": 0, "rank": 0, "node": "n1"}, time.time()
    zero = {"how": "from zero", "step": 1, "best": 147, "text": "the script started again from step 1: at least N lost"}
    unknown = {"how": "unknown", "step": None, "before": 9, "best": 147, "lost": None, "text": "unknown: it has read x"}

    def start(at: float, **told: Any) -> list[str]:
        place.event("rank_started", **rank, seconds=1.0, time=now + at)
        place.event("first_step", **rank, step=1, seconds=2.0, time=now + at + 1)
        if told:
            place.event("restarted", **rank, **told, time=now + at + 2)
        return cli("status", str(place.run.path)).out.splitlines()

    start(-90)
    place.event("rank_exited", **{**rank, "rank": 1}, signal="SIGKILL", exit_code=None, time=now - 80)
    lines = start(-70, **zero, before=147, lost=147)
    assert f"warning  {zero['text']}" in lines and not any("recovered" in line for line in lines)
    lines = start(-50, **zero, before=9, lost=9)
    assert f"warning  {zero['text']} (2 times in this run: 156 steps)" in lines
    assert f"warning  {unknown['text']}" in start(-30, **unknown)
    lines = start(-10, how="went on", step=31, before=30, best=147, lost=None, text="it went on")
    assert sum("warning" in line for line in lines) == 1
    assert not any("recovered" in line for line in lines), "it has not made up for the lost steps yet"
    with (place.run.path / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"time": now - 5, "attempt": 0, "step": 148, "seconds": {"training": 3.0}}) + "\n")
    lines = cli("status", str(place.run.path)).out.splitlines()
    assert any(line.startswith("recovered once") for line in lines)
    told = json.loads(cli("status", str(place.run.path), "--json").out)
    assert [each["how"] for each in told["restarts"]] == ["from zero", "from zero", "unknown", "went on"]
    assert told["restarts"][0] == {
        "time": pytest.approx(now - 68), "attempt": 0, "how": "from zero", "step": 1, "before": 147, "best": 147,
        "lost": 147,
    }  # fmt: skip
    assert told["recovered"] == 1


def test_explain_the_lead_of_a_run_that_goes_on(place: Place, desk: Desk, cli: Cli) -> None:
    desk.write("job.yaml", "site: cores\nresources: {time: 1h}\ntrain: {task: lm, data: {path: books}}\n")
    done = cli("check", "job.yaml", "--explain", "timeouts.stop")
    assert done.out.splitlines() == [
        "timeouts.stop = null",
        "  built-in",
        "  planned: 120 s (the save time is unknown; with --resume RUN, the longest save of RUN counts)",
    ]
    (place.run.checkpoints / "step-00000005").mkdir(parents=True)
    (place.run.checkpoints / "step-00000005" / "COMPLETE").touch()
    place.run.job_json.write_text("{}")
    for seconds in (12.0, 150.5, None):
        place.event("checkpoint_saved", step=5, seconds=seconds)
    done = cli("check", "job.yaml", "--resume", str(place.run.path), "--explain", "timeouts.stop")
    assert "planned: 331 s (the longest save of the resumed runs took 150 s" in done.out
    done = cli("submit", "job.yaml", "--resume", str(place.run.path), "--dry-run")
    assert "#SBATCH --signal=B:USR2@331" in done.out, done.err
    done = cli("check", "job.yaml", "--set", "timeouts.stop=90s", "--explain", "timeouts.stop")
    assert done.out.splitlines()[-1] == "  planned: 90 s, as set"
