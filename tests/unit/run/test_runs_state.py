"""The verdict about a run, from every kind of evidence."""

import json
from pathlib import Path
from typing import Any

import pytest

from slurmddp.cluster.base import JobId, JobView
from slurmddp.cluster.states import JobState
from slurmddp.errors import UserError
from slurmddp.records.marker import Marker, Signal
from slurmddp.records.stop import BY_HAND, StopRequest
from slurmddp.records.submission import Submission
from slurmddp.run import state as module
from slurmddp.run import submission
from slurmddp.run.evidence import Evidence, evidence
from slurmddp.run.gate import own
from slurmddp.run.layout import RunFolder
from slurmddp.run.state import EXIT_CODES, RunState, judge
from tests.helpers import append_event, typed

SENT = Submission("123", "slurm", ("sbatch",), "2025-11-20T10:00:00+00:00", "login")
DONE = Marker("done", "all steps are done", step=1000, steps=1000)
STOPPED = Marker("stopped", "time limit", step=500, steps=1000)


def started(attempt: int = 0) -> dict[str, Any]:
    return {
        "event": "job_started",
        "attempt": attempt,
        "job_id": "123",
        "node": "node1",
        "nodes": "node[1-2]",
    }


def ended(code: int = 0, signal: str = "", slurm_state: str = "", attempt: int = 0) -> dict[str, Any]:
    return {
        "event": "job_ended",
        "attempt": attempt,
        "exit_code": code,
        "signal": signal,
        "slurm_state": slurm_state,
    }


def facts(*events: dict[str, Any], marker: "Marker | None" = None, **more: Any) -> Evidence:
    markers = {0: marker} if marker else {}
    return Evidence(**{"submission": SENT, "events": typed(*events), "markers": markers, **more})


@pytest.mark.parametrize(
    ("view", "state", "detail"),
    [
        (JobView("PENDING", "Priority", 0), "pending", "Priority"),
        (JobView("PENDING", "Resources", 0, start="T"), "pending", "Resources, expected to start T"),
        (JobView("PENDING", "BeginTime", 1, start="T"), "requeued", "BeginTime from T"),
        (JobView("PENDING", "JobHeldUser", 0, start="T"), "pending", "JobHeldUser"),
        (JobView("PENDING", "launch_failed_requeued_held", 1, start="T"), "requeued", "launch_failed_requeued_held"),
        (JobView("REQUEUED", "", 1), "requeued", ""),
        (JobView("REQUEUE_HOLD", "x", 1), "requeued", "x, held: `scontrol release 123`"),
        (JobView("CONFIGURING"), "pending", "nodes are being prepared"),
        (JobView("RUNNING", nodes="node[1-2]"), "running", "on node[1-2]"),
        (JobView("SUSPENDED", nodes="node1"), "running", "on node1, suspended"),
        (JobView("COMPLETING"), "stopping", "processes are exiting"),
        (JobView("COMPLETED", exit_code=0), "done", ""),
        (JobView("FAILED", "NonZeroExitCode", 0, 3), "failed", "exit code 3, before it started"),
        (JobView("FAILED", "", 0, 0, 9), "failed", "signal 9, before it started"),
        (JobView("TIMEOUT", "TimeLimit", 0, 0, 15), "timed out", "before it started"),
        (JobView("DEADLINE", "DeadLine"), "timed out", "before it started"),
        (JobView("NODE_FAIL", "NodeDown"), "node failure", "before it started"),
        (JobView("BOOT_FAIL"), "node failure", "before it started"),
        (JobView("CANCELLED"), "cancelled", "before it started"),
        (JobView("CANCELLED", "BeginTime"), "cancelled", "before it started"),
        (JobView("FAILED", "RaisedSignal:53(Real-time_signal_19)"), "failed", "RaisedSignal:53"),
        (JobView("OUT_OF_MEMORY"), "out of memory", "before it started"),
        (JobView("PREEMPTED"), "cancelled", "preempted"),
        (JobView("NEW_IN_SLURM_30"), "lost", "unknown Slurm state NEW_IN_SLURM_30"),
    ],
)
def test_slurm_knows_the_job(view: JobView, state: str, detail: str) -> None:
    verdict = judge(view, facts())
    assert verdict.state == state
    assert verdict.detail.startswith(detail)


def test_pending_again_where_slurm_does_not_count_restarts() -> None:
    assert judge(JobView("PENDING", "BeginTime"), facts(started())).state == "requeued"


def test_slurm_remembers_a_preemption_of_an_earlier_start() -> None:
    done = {**ended(0, attempt=1), "decision": "done"}
    again = (started(), requeued("requeue"), ended(0), started(1), done)
    assert judge(JobView("PREEMPTED"), facts(*again)).state == "done"
    assert judge(JobView("PREEMPTED"), facts(*again[:-2])).state == "cancelled"


def test_stop_file() -> None:
    assert judge(JobView("RUNNING"), facts(started(), stop=StopRequest(BY_HAND))).state == "stopping"
    asked = judge(JobView("RUNNING", nodes="n1"), facts(started(), stop=StopRequest("time limit")))
    assert asked == RunState("stopping", "on n1, asked to save and exit (time limit)")
    assert judge(JobView("PENDING"), facts(stop=StopRequest(BY_HAND))).state == "pending"


@pytest.mark.parametrize(
    ("view", "marker", "state", "detail"),
    [
        (JobView("COMPLETED", exit_code=0), DONE, "done", "step 1000 of 1000"),
        (JobView("COMPLETED", exit_code=0), STOPPED, "stopped", "time limit, step 500 of 1000"),
        (JobView("FAILED", exit_code=1), STOPPED, "stopped", "time limit, step 500 of 1000"),
        (JobView("PREEMPTED"), STOPPED, "stopped", "preempted, time limit, step 500 of 1000"),
        (JobView("FAILED", exit_code=1), DONE, "failed", "exit code 1, step 1000 of 1000"),
        (JobView("CANCELLED", signal=15), STOPPED, "cancelled", "step 500 of 1000"),
        (JobView("TIMEOUT"), STOPPED, "timed out", "step 500 of 1000"),
        (JobView("RUNNING"), STOPPED, "running", ""),
    ],
)
def test_slurms_word_and_the_marker(view: JobView, marker: Marker, state: str, detail: str) -> None:
    assert judge(view, facts(started(), marker=marker)) == RunState(state, detail)


TERM = Signal("SIGTERM", 0, "node1")
TERMED = Marker("stopped", "SIGTERM received by rank 0 on node1", signal=TERM, step=500, steps=1000)
KILLED = RunState("failed", "job.sh was killed by SIGKILL on node1 (out of memory?), step 500 of 1000")

ASKED = RunState("stopped", f"{TERMED.reason}, step 500 of 1000")


@pytest.mark.parametrize(
    ("view", "more", "verdict"),
    [
        (JobView("FAILED", "RaisedSignal:9", 0, 0, 9), [], KILLED),
        (JobView("FAILED", "RaisedSignal:9", 0, 0, 9), [ended(137, "KILL", "FAILED")], KILLED),
        (JobView("FAILED", "NonZeroExitCode", 0, 1), [ended(1)], ASKED),
        (None, [], KILLED),
        (None, [ended(137, "KILL", "FAILED")], KILLED),
        (None, [{"event": "cancel_requested"}], RunState("cancelled", "step 500 of 1000")),
    ],
)  # fmt: skip
def test_a_killed_job_script_is_no_stop(view: JobView | None, more: list[dict[str, Any]], verdict: RunState) -> None:
    """The ranks saved at Slurm's SIGTERM, and wrote that they were stopped."""
    assert judge(view, facts(started(), *more, marker=TERMED)) == verdict


def test_a_marker_of_an_older_attempt_says_nothing() -> None:
    again = facts(started(0), ended(0), started(1), marker=STOPPED)
    assert judge(JobView("COMPLETED", exit_code=0), again).state == "done"
    assert judge(None, again).state == "lost"


def test_a_run_that_is_not_requeued_at_its_time_limit_is_stopped() -> None:
    told = {"event": "attempt_ended", "attempt": 0, "decision": "stopped", "cause": "time limit; saved nothing"}
    ends = ended(143, "TERM", "COMPLETING") | {"slurm_reason": "TimeLimit"}
    for kept, state in (({"not_requeued": "saved nothing"}, "stopped"), ({}, "timed out")):
        seen = facts(started(), {**told, **kept}, ends)
        for view in (JobView("TIMEOUT"), None):
            found = judge(view, seen)
            assert (found.state, found.detail) == (state, told["cause"] if kept else "")


@pytest.mark.parametrize(
    ("events", "marker", "state"),
    [
        ([started(), ended(0)], None, "done"),  # a user's own script
        ([started(), ended(0, slurm_state="RUNNING")], DONE, "done"),
        ([started(), ended(0)], STOPPED, "stopped"),
        ([started(), ended(1)], STOPPED, "stopped"),
        ([started(), ended(1)], None, "failed"),
        ([started(), ended(1, "TERM", "TIMEOUT")], STOPPED, "timed out"),
        ([started(), ended(143, "TERM", "CANCELLED")], None, "cancelled"),
        ([started(), ended(143, "TERM", "CANCELLED by 1001")], None, "cancelled"),
        ([started(), ended(143, "TERM", "COMPLETING")], None, "cancelled"),
        ([started(), ended(143, "SIGINT")], None, "cancelled"),
        ([started(), {**ended(1, "TERM", "COMPLETING"), "slurm_reason": "TimeLimit"}], STOPPED, "timed out"),
        ([started(), {**ended(1, "TERM", "COMPLETING"), "slurm_reason": "None"}], STOPPED, "cancelled"),
        ([started(), {"event": "cancel_requested"}, ended(1, "TERM")], STOPPED, "cancelled"),
        ([{"event": "cancel_requested"}, started(), ended(1, "TERM")], STOPPED, "stopped"),
        ([started(), ended(1, "TERM", "PREEMPTED")], None, "cancelled"),
        ([started(), ended(1, slurm_state="NODE_FAIL")], None, "node failure"),
        ([started(), ended(137, slurm_state="OUT_OF_MEMORY")], None, "out of memory"),
        ([started(), ended(1, "TERM", "REQUEUED")], STOPPED, "lost"),
        ([started(), ended(1), started(1), ended(0, attempt=1)], None, "done"),
        ([started(), ended(0), started(1)], None, "lost"),
        ([started()], None, "lost"),
        ([started()], DONE, "done"),
        ([started()], STOPPED, "stopped"),
        ([], None, "lost"),
    ],
)
def test_slurm_has_forgotten_it(events: list[dict[str, Any]], marker: "Marker | None", state: str) -> None:
    assert judge(None, facts(*events, marker=marker)).state == state


NO_PROGRESS = Marker("no progress", "3 starts in a row ended at step 40", step=40, steps=1000)
CANCELLED = Marker("stopped", "cancelled by the user", step=500, steps=1000)


def attempt_ended(decision: str, code: int = 1, attempt: int = 0, **more: Any) -> dict[str, Any]:
    return {"event": "attempt_ended", "attempt": attempt, "exit_code": code, "decision": decision, **more}


def requeued(how: str = "requeue", **more: Any) -> dict[str, Any]:
    return {"event": "requeued", "how": how, "reason": "time limit", "attempt": 0, **more}


@pytest.mark.parametrize(
    ("view", "marker", "events", "state", "detail"),
    [
        ("FAILED", NO_PROGRESS, [], "failed", "3 starts in a row ended at step 40"),
        ("COMPLETED", CANCELLED, [], "cancelled", "by you, checkpoint saved, step 500 of 1000"),
        ("FAILED", CANCELLED, [], "cancelled", "by you, checkpoint saved, step 500 of 1000"),
        ("FAILED", None, [{"event": "cancel_requested"}], "cancelled", ""),
        ("COMPLETED", None, [attempt_ended("stopped", 0, cause="time limit")], "stopped", "time limit"),
        (
            "COMPLETED",
            None,
            [{"event": "cancel_requested"}, attempt_ended("stopped", 0)],
            "cancelled",
            "by you, exited cleanly",
        ),
        (
            "COMPLETED",
            None,
            [attempt_ended("stopped", 0, cause="cancelled by the user", ended_by="cancelled")],
            "cancelled",
            "by you, exited cleanly",
        ),
        ("COMPLETED", None, [attempt_ended("done", 0)], "done", ""),
        ("FAILED", None, [attempt_ended("failed")], "failed", ""),
        ("PENDING", STOPPED, [requeued()], "requeued", "after time limit, step 500 of 1000"),
        ("PENDING", STOPPED, [], "requeued", "after time limit, step 500 of 1000"),
        ("PENDING", None, [requeued(reason="too few nodes")], "requeued", "after too few nodes"),
    ],
)
def test_what_the_script_decided(
    view: str, marker: "Marker | None", events: list[dict[str, Any]], state: str, detail: str
) -> None:
    told = facts(started(), *events, marker=marker)
    assert judge(JobView(view), told) == RunState(state, detail)
    if view != "PENDING":
        after = facts(started(), *events, ended(1 if view == "FAILED" else 0), marker=marker)
        assert judge(None, after).state == state


def test_put_back_into_the_queue() -> None:
    told = facts(started(), requeued(), ended(0), marker=STOPPED)
    assert judge(JobView("COMPLETING"), told).state == "requeued"
    assert judge(JobView("PENDING", "BeginTime", 1, start="T"), told) == RunState(
        "requeued", "BeginTime from T, after time limit, step 500 of 1000"
    )
    assert judge(None, told, answered=False).state == "requeued"
    assert judge(None, told).state == "lost"
    cancelled = facts(started(), requeued(), ended(0), {"event": "cancel_requested"}, marker=STOPPED)
    assert judge(None, cancelled) == RunState("cancelled", "while pending, step 500 of 1000")
    assert judge(None, facts({"event": "cancel_requested"})) == RunState("cancelled", "before it started")
    assert judge(None, facts({"event": "cancel_requested"}, started())).state == "lost"


@pytest.mark.parametrize(
    "job",
    [
        None,
        JobView("TIMEOUT", "TimeLimit"),
        JobView("NODE_FAIL", "NodeDown"),
        JobView("FAILED", "RaisedSignal:9", signal=9),
        JobView("OUT_OF_MEMORY"),
        JobView("CANCELLED"),
    ],
)
def test_a_recorded_cancel_wins(job: JobView | None) -> None:
    """Whatever else ended the job, and whether Slurm still knows it: such runs were `lost ... submit again`."""
    asked = {"event": "cancel_requested"}
    for end in ((), (attempt_ended("failed"),), (requeued(), ended(0)), (ended(1, "TERM", "TIMEOUT"),)):
        assert judge(job, facts(started(), asked, *end)).state == "cancelled", end
    assert judge(job, facts(started(), asked, marker=DONE)).state == ("cancelled" if job else "done")


def test_a_cancelled_run_that_waits_in_the_queue_says_so() -> None:
    found = judge(JobView("PENDING", "BeginTime"), facts(started(), {"event": "cancel_requested"}))
    assert found.state == "requeued" and "cancelled by you" in found.line
    again = facts(started(), requeued(), ended(0), started(1), marker=STOPPED)
    assert judge(None, again, answered=False).state == "running"
    assert judge(JobView("RUNNING"), again).state == "running"


def test_a_chain_of_jobs() -> None:
    chained = requeued("chain", next_job="124")
    told = facts(started(), chained, ended(0), marker=STOPPED)
    assert told.job_ids == (JobId("123"), JobId("124"))
    assert told.job_id == JobId("124")
    assert judge(JobView("PENDING", "Dependency", 0), told).state == "requeued"
    more = facts(started(), chained, started(1), requeued("chain", next_job="125"), requeued("chain", next_job="125"))
    assert more.job_ids == (JobId("123"), JobId("124"), JobId("125"))
    for odd in ("", "123", "12x", None):
        assert facts(started(), requeued("chain", next_job=odd)).job_ids == (JobId("123"),)
    assert facts(requeued("requeue", next_job="124")).job_id == JobId("123")
    elsewhere = Submission("123;alpha", "slurm", (), "", "")
    assert facts(chained, submission=elsewhere).job_id == JobId("124", "alpha")


def test_several_attempts_in_one_job() -> None:
    told = facts(started(), attempt_ended("next attempt"), attempt_ended("failed", attempt=1), marker=STOPPED)
    assert told.attempt == 1
    assert told.marker is None, "that of an older attempt"
    assert told.attempt_ended == typed(attempt_ended("failed", attempt=1))[0].facts
    assert judge(JobView("FAILED", exit_code=1), told) == RunState("failed", "exit code 1")
    going = facts(started(), attempt_ended("next attempt"), {"event": "attempt_started", "attempt": 1})
    assert going.attempt_ended is None
    assert judge(JobView("RUNNING", nodes="n1"), going) == RunState("running", "on n1")


def test_the_newest_measurement_of_the_network_counts() -> None:
    measured = [{"event": "network", "text": "bus 1 GB/s"}, {"event": "network", "text": "bus 2 GB/s"}]
    assert facts(*measured, {"event": "attempt_started"}).network == "bus 2 GB/s"
    assert facts().network == "" and facts({"event": "network"}).network == ""


def test_nodes_that_the_run_does_without() -> None:
    excluded = [
        {"event": "node_excluded", "excluded": "n2", "reason": "lost"},
        {"event": "node_excluded", "excluded": "n3"},
        {"event": "node_excluded", "excluded": "n2", "reason": "did not answer"},
        {"event": "node_excluded"},
    ]
    assert facts(*excluded).excluded == {"n2": "did not answer", "n3": ""}


def test_lost_says_what_to_do() -> None:
    verdict = judge(None, facts(started()))
    for part in ("node1", "no longer knows job 123", "logs/job.log", "resume"):
        assert part in verdict.detail
    signal = judge(None, facts(started(), stop=StopRequest("SIGTERM", signal=True))).detail
    assert ": job.sh got SIGTERM (time limit, preemption or scancel), then the node failed or job.sh was" in signal
    asked = judge(None, facts(started(), stop=StopRequest("time limit"))).detail
    assert ": it was asked to stop (time limit), then the node failed or job.sh was killed. " in asked
    local = Submission("local-7-8", "local", (), "", "laptop")
    assert "started on laptop" in judge(None, facts(started(), submission=local)).detail
    assert "never started" in judge(None, facts()).detail


def test_slurm_did_not_answer() -> None:
    assert judge(None, facts(), answered=False).state == "pending"
    assert judge(None, facts(started()), answered=False).state == "running"
    assert "did not answer" in judge(None, facts(started()), answered=False).detail
    assert judge(None, facts(started(), ended(0)), answered=False).state == "done"


def test_inside_an_allocation_that_goes_on() -> None:
    inside = Submission("123", "allocation", (), "", "node1")
    for sent in (inside, None):
        assert judge(JobView("RUNNING"), facts(started(), submission=sent)).state == "running"
        assert judge(JobView("RUNNING"), facts(started(), ended(0), submission=sent)).state == "done"
        assert judge(JobView("RUNNING"), facts(started(), ended(3), submission=sent)).state == "failed"
    assert judge(JobView("TIMEOUT"), facts(started(), submission=inside)).state == "timed out"


def test_never_submitted() -> None:
    verdict = judge(None, Evidence())
    assert (verdict.state, verdict.exit_code, verdict.going) == ("not submitted", 1, False)


def test_exit_codes() -> None:
    assert {state for state, code in EXIT_CODES.items() if code == 0} == {"done"}
    going = {state for state, code in EXIT_CODES.items() if code == 3}
    assert going == {"pending", "running", "requeued", "stopping"}
    words = {
        module._RUNS.get(each, each.text) for each in JobState if each not in (JobState.PREEMPTED, JobState.UNKNOWN)
    }
    assert words <= set(EXIT_CODES)
    assert all(RunState(state).going == (state in going) for state in EXIT_CODES)


def test_evidence_of_a_folder(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert evidence(run) == Evidence(markers={})
    assert evidence(run).job_id is None
    run.markers.mkdir()
    append_event(run.events, **started())
    assert evidence(run).job_id == JobId("123"), "`slurmddp run`: known from its own event"
    run.marker(0).write_text(json.dumps({"state": "stopped", "step": 5, "steps": 9, "reason": "SIGTERM"}))
    run.marker(1).write_text('{"state": "do')
    (run.markers / "attempt-002.json.part").write_text("{")
    with run.events.open("a") as file:
        file.write("garbage\n")
    submission.write(own(run, to="write"), Submission("124;alpha", "slurm", (), "t", "h"))
    run.stop.write_text("user\n")
    found = evidence(run)
    assert found.markers == {0: Marker("stopped", "SIGTERM", step=5, steps=9)}
    assert found.job_id == JobId("124", "alpha")
    assert found.stop == StopRequest("user")
    assert len(found.notes) == 2 and "1 damaged" in found.notes[0] and "attempt-001" in found.notes[1]
    run.submission.write_text("{")
    with pytest.raises(UserError):
        evidence(run)


def test_a_script_started_by_hand_has_no_job(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    append_event(run.events, "job_started", attempt=0, job_id="local-123")
    assert evidence(run).job_id is None
    assert judge(None, evidence(run)).state == "lost"
