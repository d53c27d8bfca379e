"""Parsers of Slurm's output, on texts in samples/."""

from pathlib import Path

import pytest

from slurmddp.cluster import parse
from slurmddp.cluster.base import JobId, JobView, clean_environment, log_option
from slurmddp.cluster.states import JobState
from slurmddp.errors import ExternalError, UserError

SAMPLES = Path(__file__).parent / "samples"


def sample(name: str) -> str:
    return (SAMPLES / f"{name}.txt").read_text(encoding="utf-8")


def scontrol(name: str) -> JobView:
    view = parse.scontrol_job(sample(f"scontrol-{name}"))
    assert view is not None
    return view


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("123\n", JobId("123")),
        ("123;alpha\n", JobId("123", "alpha")),
        ("*** Maintenance on 1 May ***\n2025\n\n  123  \nHave a nice day\n", JobId("123")),
        ("7\nwelcome\n123;alpha", JobId("123", "alpha")),
        ("Submitted batch job 123\n", JobId("123")),
        ("-> checks passed\nSubmitted batch job 123 on cluster alpha\n", JobId("123", "alpha")),
        ("sbatch: lua: Submitted batch job 123", JobId("123")),
        ("Submitted batch job 7\n123\n", JobId("123")),
    ],
)
def test_job_id_among_banners(output: str, expected: JobId) -> None:
    assert parse.submitted(output) == expected


@pytest.mark.parametrize("output", ["", "welcome\n", "job 123 queued\n", "123 456\n", "12a\n", "-5\n", "\u0661\n"])
def test_other_output_is_shown_whole(output: str) -> None:
    with pytest.raises(ExternalError) as error:
        parse.submitted(output)
    assert (output.strip() or "(nothing)") in str(error.value)
    assert "squeue" in str(error.value)
    assert "may be in the queue" in str(error.value)


def test_pending() -> None:
    view = scontrol("pending")
    assert (view.word, view.reason, view.restarts, view.nodes) == ("PENDING", "Resources", 0, "")
    assert (view.start, view.time_limit, view.source) == ("2025-11-20T14:30:00", 3600, "scontrol")
    view = scontrol("pending-unknown-start")
    assert (view.start, view.end, view.time_limit) == (None, None, None)


def test_running() -> None:
    view = scontrol("running")
    assert (view.word, view.reason, view.nodes) == ("RUNNING", "", "node[1-2]")
    assert (view.start, view.end) == ("2025-11-20T14:00:02", "2025-11-20T15:00:02")


def test_requeued() -> None:
    view = scontrol("requeued")
    assert (view.word, view.reason, view.restarts) == ("PENDING", "BeginTime", 1)


@pytest.mark.parametrize(
    ("name", "state", "reason", "exit_code", "signal"),
    [
        ("completing", "COMPLETING", "TimeLimit", 0, 15),
        ("timeout", "TIMEOUT", "TimeLimit", 0, 15),
        ("node-fail", "NODE_FAIL", "NodeDown", 0, None),
        ("cancelled", "CANCELLED", "", 0, 15),
        ("completed", "COMPLETED", "", 0, None),
        ("failed", "FAILED", "NonZeroExitCode", 3, None),
    ],
)
def test_ended(name: str, state: str, reason: str, exit_code: int, signal: "int | None") -> None:
    view = scontrol(name)
    assert (view.word, view.reason, view.exit_code, view.signal) == (state, reason, exit_code, signal)


@pytest.mark.parametrize(
    ("name", "state", "reason", "restarts", "exit_code", "signal", "nodes", "limit"),
    [
        ("running", "RUNNING", "", 0, 0, None, "node[1-2]", 300),
        ("pending", "PENDING", "Resources", 0, 0, None, "", 93840),  # named `a name JobState=FAILED`
        ("requeued", "PENDING", "BeginTime", 1, 0, None, "", 300),
        ("completing", "COMPLETING", "", 0, 0, None, "node1", 31536000),
        ("cancelled-trap", "CANCELLED", "", 0, 5, None, "node1", 31536000),
        ("cancelled-pending", "CANCELLED", "BeginTime", 1, 0, None, "", 300),
        ("failed", "FAILED", "NonZeroExitCode", 0, 3, None, "node1", 31536000),
    ],
)
def test_a_real_scontrol(
    name: str,
    state: str,
    reason: str,
    restarts: int,
    exit_code: int,
    signal: "int | None",
    nodes: str,
    limit: int,
) -> None:
    view = parse.scontrol_job(sample(f"real-scontrol-{name}"))
    assert view is not None
    assert (view.word, view.reason, view.restarts) == (state, reason, restarts)
    assert (view.exit_code, view.signal, view.nodes, view.time_limit) == (exit_code, signal, nodes, limit)


def test_a_real_squeue() -> None:
    (view,) = parse.squeue_jobs(sample("real-squeue-requeued")).values()
    assert (view.word, view.reason, view.restarts, view.nodes) == ("PENDING", "BeginTime", 1, "")
    assert (view.start, view.time_limit) == ("2026-11-20T14:46:52", 300)


def test_time_limit_forms() -> None:
    assert scontrol("timeout").time_limit == 93784
    assert scontrol("failed").time_limit is None


def test_names_and_comments_are_not_read_as_fields() -> None:
    view = scontrol("forged")
    assert (view.word, view.restarts, view.exit_code) == ("RUNNING", 0, 0)


def test_banner_of_a_wrapped_scontrol() -> None:
    view = parse.scontrol_job("welcome to alpha\n" + sample("scontrol-running"))
    assert view == scontrol("running")
    assert parse.scontrol_job("No jobs in the system\n") is None


def test_sacct() -> None:
    completed = parse.sacct_jobs(sample("sacct-completed"))["42"]
    assert completed == JobView(
        word="COMPLETED",
        restarts=0,
        exit_code=0,
        nodes="node[1-2]",
        start="2025-11-20T14:00:02",
        end="2025-11-20T14:10:00",
        time_limit=3600,
        source="sacct",
    )
    cancelled = parse.sacct_jobs(sample("sacct-cancelled"))["42"]
    assert (cancelled.word, cancelled.signal) == ("CANCELLED", 15)
    never_ran = parse.sacct_jobs(sample("sacct-cancelled-pending"))["42"]
    assert (never_ran.word, never_ran.start, never_ran.nodes) == ("CANCELLED", None, "")


@pytest.mark.parametrize(
    ("output", "joules"),
    [
        ("42|500\n42.batch|200\n42.0|290\n42|100\n", 600),
        ("42|\n42.batch|200\n42.0|290\n", 490),
        ("42|18446744073709551614\n42.0|0\na banner\n", None),
        ("", None),
    ],
)
def test_energy(output: str, joules: int | None) -> None:
    assert parse.joules(output) == joules


def test_sacct_counts_the_newest_record_of_a_requeued_job() -> None:
    lines = sample("sacct-requeued").splitlines()
    for order in (lines, lines[::-1]):  # sacct does not promise an order
        jobs = parse.sacct_jobs("\n".join(["a banner | with bars", *order]))
        assert (jobs["42"].word, jobs["42"].restarts, jobs["42"].nodes) == ("TIMEOUT", 2, "node[1,3]")
        assert (jobs["43"].word, jobs["43"].restarts) == ("OUT_OF_MEMORY", 0)


def squeue_line(*values: str) -> str:
    widths = [int(column.split(":")[1]) for column in parse.SQUEUE_FORMAT.split(",")]
    return "".join(value[:width].ljust(width) for value, width in zip(values, widths, strict=True))


def test_squeue() -> None:
    reason = "ReqNodeNotAvail, UnavailableNodes:node[1-2]"
    text = "\n".join(
        [
            "CLUSTER: alpha",
            squeue_line("42", "PENDING", "2", "2025-11-20T14:30:00", "N/A", "1-00:00:00", reason, ""),
            squeue_line("43", "RUNNING", "0", "2025-11-20T14:00:00", "N/A", "UNLIMITED", "None", "n[1-9]"),
        ]
    )
    jobs = parse.squeue_jobs(text)
    assert jobs["42"] == JobView(
        word="PENDING",
        reason=reason,
        restarts=2,
        start="2025-11-20T14:30:00",
        time_limit=86400,
        source="squeue",
    )
    assert (jobs["43"].word, jobs["43"].reason, jobs["43"].nodes) == ("RUNNING", "", "n[1-9]")


def test_kinds_of_failure() -> None:
    assert parse.is_forgotten("slurm_load_jobs error: Invalid job id specified")
    assert parse.is_forgotten("Job 42 not found")
    assert not parse.is_forgotten("bash: squeue: command not found")
    assert parse.is_unreachable("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    assert parse.is_unreachable("sacct: error: Problem talking to the database: Connection refused")
    assert parse.is_unreachable("slurm_load_jobs error: Socket timed out on send/recv operation")
    assert not parse.is_unreachable("sbatch: error: Batch job submission failed: Invalid account")
    assert parse.is_accounting_off("SLURM accounting storage is disabled")


def test_job_ids() -> None:
    for text in ("123", "123;alpha", "local-12-3456"):
        assert str(JobId.parse(text)) == text
    assert JobId.parse("local-12-3456").is_local
    for text in ("", "abc", "12 3", "123;", "123;a;b", "local-12", "-1", "\u0661", "9" * 5000, f"local-{'9' * 5000}-1"):
        with pytest.raises(UserError):
            JobId.parse(text)


def test_environment_is_scrubbed_but_the_cluster_is_still_found() -> None:
    leaked = {
        "SLURM_JOB_ID": "1",
        "SBATCH_ACCOUNT": "x",
        "PMIX_RANK": "0",
        "PMI_SIZE": "1",
        "SQUEUE_STATES": "CG",
    }
    kept = {
        "SLURM_CONF": "/etc/slurm.conf",
        "SLURM_JWT": "x",
        "PATH": "/bin",
        "PMID": "1",
        "MY_SLURM_VAR": "2",
    }
    assert clean_environment({**leaked, **kept}) == kept


def test_log_option() -> None:
    assert log_option("/runs/a/logs/job.log") == "--output=/runs/a/logs/job.log"
    assert log_option("/runs/100%j/job.log") == "--output=/runs/100%%j/job.log"
    with pytest.raises(UserError, match="backslash"):
        log_option("/runs/a\\b/job.log")


def test_states() -> None:
    over = {word for state in JobState if state.over for word in state.words}
    assert over == {
        "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "DEADLINE", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
        "NODE_FAIL", "BOOT_FAIL", "LAUNCH_FAILED", "RECONFIG_FAIL",
    }  # fmt: skip
    assert JobState.of("CANCELLED by 1000") is JobState.of("CANCELLED+") is JobState.CANCELLED
    assert JobState.of("NEW_IN_SLURM_30") is JobState.of("") is JobState.UNKNOWN
    assert not JobState.UNKNOWN.over
    assert JobState.of("LAUNCH_FAILED").text == "failed" and JobState.of("LAUNCH_FAILED") is not JobState.FAILED
