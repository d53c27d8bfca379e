"""`slurmddp status`: how far a run is, how fast, and until when; `--watch` shows it as it changes."""

import json
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from slurmddp.cluster.base import JobView
from slurmddp.cluster.reasons import reason_text
from slurmddp.commands.status import METRICS, by_step, sparkline
from slurmddp.records.marker import Marker
from slurmddp.records.metrics import Metrics
from slurmddp.records.submission import now as submitted_now
from slurmddp.report.progress import Progress, count_nodes, find_progress, progress_lines, span, waits_text
from slurmddp.run import submission
from slurmddp.run.evidence import evidence
from slurmddp.run.gate import own
from slurmddp.run.layout import RunFolder
from tests.helpers import Desk, Result, append_event, node_log

Cli = Callable[..., Result]

RUNNING = """#!/bin/bash
echo "JobId=7 JobName=gpt UserId=a(1) JobState=RUNNING Reason=None TimeLimit=04:00:00 NodeList=n[1-4] Features=x"
"""


@pytest.fixture
def run(desk: Desk) -> RunFolder:
    """A run that has trained 100 of 1000 steps, 2 s each, in an hour's job; one host is slow."""
    folder = RunFolder(desk.project / "runs" / "gpt-1")
    for path in (folder.logs, folder.markers):
        path.mkdir(parents=True)
    now = time.time()
    folder.manifest.write_text(json.dumps({"run": "gpt-1", "name": "gpt", "created": "2026-01-01T00:00:00+00:00"}))
    folder.job_json.write_text("{}")
    submission.write(own(folder, to="write"), submitted_now("7", "slurm", ("sbatch",)))
    rank = {"attempt": 0, "node": "n1", "rank": 0}

    def event(seconds_ago: float, name: str, **facts: Any) -> None:
        append_event(folder.events, name, **{"time": now - seconds_ago, **facts})

    event(3600, "job_started", attempt=0, job_id="7", node="n1", nodes="n[1-4]")
    event(3590, "attempt_started", attempt=0, nodes="n1 n2 n4")
    event(3580, "started", world=12, backend="nccl", **rank)
    for host, part in (("n2", "data"), ("n4", "compute")):
        event(50, "straggler_begins", host=host, slow_rank=9, part=part, factor=1.83, seconds_a_step=0.4, **rank)
    event(40, "straggler_ends", host="n2", slow_rank=9, part="data", factor=1.83, seconds_a_step=0.4, **rank)
    rows = [
        {
            "time": now - 2 * (100 - step), "attempt": 0, "step": step, "loss": 200 / step,
            "samples_per_second": 512.0, "tokens_per_second": 1.2e6,
            "seconds": {"forward": 1.5 * step, "network": 0.5 * step},
        }
        for step in range(1, 101)
    ]  # fmt: skip
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder.progress.write_text("100 1000\n")
    desk.program("scontrol", RUNNING)
    return folder


def test_a_step_of_an_earlier_start_is_called_so(run: RunFolder, cli: Cli) -> None:
    assert "step     100 of 1000 (10 %), loss 2\n" in cli("status", str(run.path)).out
    for event, line in (
        ("first_step", "loss 2\n"),
        ("attempt_started", "loss 2 (of an earlier start)\n"),
        ("rank_started", "loss 2 (of an earlier start)\n"),
        ("first_step", "loss 2\n"),
    ):
        append_event(run.events, event, attempt=1, node="n1", rank=0, step=1)
        told = cli("status", str(run.path)).out
        assert line in told and not ("earlier" in line and "\nspeed " in told), told


@pytest.mark.parametrize("known", [True, False])
def test_the_breakers_sentence_stands_once(run: RunFolder, cli: Cli, desk: Desk, known: bool) -> None:
    """As the state, where its marker is there; else behind the cause."""
    desk.program("scontrol", RUNNING.replace("RUNNING", "FAILED"))
    why = "3 starts in a row crashed before step 1"
    facts = {"exit_code": 1, "cause": "ValueError: boom", "rank": 0, "decision": "failed", "more": why}
    append_event(run.events, "attempt_ended", attempt=0, node="n1", **facts)
    if known:
        run.markers.mkdir(exist_ok=True)
        run.marker(0).write_text(Marker("no progress", why, "ValueError: boom", rank=0, node="n1").text(0))
    told = cli("status", str(run.path)).out
    assert told.count(why) == 1 and "cause    rank 0 on n1: ValueError: boom" in told
    assert ("; " + why in told) is not known


def test_a_crash_loop_looks_like_one(run: RunFolder, cli: Cli) -> None:
    """A rank is killed, and two further starts fail before their first step: no speed of the start that went well."""
    rank = {"attempt": 0, "node": "n1", "rank": 0}
    append_event(run.events, "rank_exited", attempt=0, node="n2", rank=3, exit_code=None, signal="SIGKILL")
    for code in (1, 1, None):
        append_event(run.events, "rank_started", time=time.time(), seconds=1.0, **rank)
        if code:
            append_event(run.events, "rank_exited", exit_code=code, signal=None, **rank)
    log = node_log(run, 0, "n1")
    log.parent.mkdir(parents=True)
    log.write_text("[rank0]: Traceback (most recent call last):\n[rank0]: KeyError: 'lr'\n")
    told = cli("status", str(run.path)).out
    lines = told.splitlines()
    assert "starts   0 steps in 3 starts" in lines
    assert "fault    rank 3 on n2: killed by SIGKILL (out of memory?)" in lines
    (cause,) = [line for line in lines if line.startswith("cause ")]
    assert cause.startswith("cause    rank 0 on n1: KeyError: 'lr'"), "the newest error"
    assert not re.search("^(speed|ends|stall) ", told, re.MULTILINE), told
    as_json = json.loads(cli("status", str(run.path), "--json").out)
    assert as_json["starts_without_step"] == 3 and as_json["per_second"] == {} and as_json["expected_end"] is None
    (fault,) = as_json["faults"]
    assert (fault["attempt"], fault["rank"], fault["node"], fault["signal"]) == (0, 3, "n2", "SIGKILL")
    append_event(run.events, "first_step", time=time.time(), step=101, seconds=1.0, **rank)
    told = cli("status", str(run.path)).out
    assert "steps in" not in told and "\nfault " in told


def test_an_agent_that_did_not_answer_has_a_line_afterwards(run: RunFolder, cli: Cli) -> None:
    """Nobody killed a rank: the others waited for it, and another attempt followed."""
    cause = "RendezvousTimeoutError: node n2 did not come"
    end = {"attempt": 0, "exit_code": 1, "cause": cause, "node": "n2", "rank": None}
    append_event(run.events, "attempt_ended", decision="stopped", **end)
    assert "\nfault " not in cli("status", str(run.path)).out
    append_event(run.events, "attempt_ended", decision="next", **end)
    append_event(run.events, "attempt_started", attempt=1, nodes="n1 n4")
    line = f"fault    attempt 0 ended: n2: {cause}"
    assert line in cli("status", str(run.path)).out.splitlines()
    append_event(run.events, "rank_exited", attempt=1, node="n4", rank=3, exit_code=None, signal="SIGKILL")
    assert "fault    rank 3 on n4: killed by SIGKILL" in cli("status", str(run.path)).out


def test_a_second_start_that_has_just_begun_is_no_loop(run: RunFolder, cli: Cli) -> None:
    """After a time limit nothing has failed."""
    for _ in range(2):
        append_event(run.events, "rank_started", time=time.time() - 4000, attempt=0, node="n1", rank=0, seconds=1.0)
    assert "steps in" not in cli("status", str(run.path)).out


def test_one_screen(run: RunFolder, cli: Cli) -> None:
    done = cli("status", str(run.path))
    lines = done.out.splitlines()
    assert done.code == 3
    for line in (
        "state    running on n[1-4]", "job      7", "step     100 of 1000 (10 %), loss 2", "nodes    3 (nccl)",
        "speed    1.2M tokens/s, 512 samples/s", "stall    25 % of the step time: waiting for the network",
        "slow     n4: compute, 1.8 times the others (rank 9)",
    ):  # fmt: skip
        assert line in lines
    assert any(line.startswith("time     1:00:0") and line.endswith(" of 4:00:00 in this job") for line in lines)
    (ends,) = [line for line in lines if line.startswith("ends ")]
    assert "(in 0:29:5" in ends or "(in 0:30:0" in ends
    assert max(map(len, lines[:-2])) <= 80, "all but paths"
    told = json.loads(cli("status", str(run.path), "--json").out)
    assert (told["step"], told["steps"], told["nodes"], told["time_limit"]) == (100, 1000, 3, 14400)
    assert told["per_second"] == {"tokens": 1.2e6, "samples": 512.0} and told["network_share"] == 0.25
    assert [each["host"] for each in told["stragglers"]] == ["n4"]
    assert abs(told["expected_end"] - time.time() - 1800) < 600


def test_the_network_of_a_script_counts_where_it_was_measured(run: RunFolder, cli: Cli) -> None:
    def share(*lines: Mapping[str, float]) -> float | None:
        rows = [{"time": 50 + at, "attempt": 0, "step": at, "seconds": told} for at, told in enumerate(lines)]
        run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
        told = json.loads(cli("status", str(run.path), "--json").out)["network_share"]
        assert told is None or isinstance(told, float)
        return told

    assert share({"data": 1, "unmeasured": 9}) is None
    assert share({"data": 1, "compute": 9}, {"data": 1, "compute": 15, "overlap": 2, "network": 2}) == 0.2


def test_the_step_of_a_finished_run_has_one_line(run: RunFolder, desk: Desk, cli: Cli) -> None:
    desk.program("scontrol", "#!/bin/bash\necho 'Invalid job id specified' >&2; exit 1\n")
    desk.program("squeue", "#!/bin/bash\nexit 0\n")
    (run.markers / "attempt-000.json").write_text('{"state": "done", "step": 1000, "steps": 1000, "reason": ""}')
    append_event(run.events, "job_ended", attempt=0, job_id="7", exit_code=0, signal="", decision="done")
    run.progress.write_text("1000 1000\n")
    lines = cli("status", str(run.path)).out.splitlines()
    assert "state    done" in lines and "step     1000 of 1000 (100 %), loss 2" in lines
    run.progress.write_text("900 1000\n")  # two steps that differ are both shown
    assert "state    done: step 1000 of 1000" in cli("status", str(run.path)).out


def test_an_end_beyond_the_time_limit_is_told(run: RunFolder, cli: Cli) -> None:
    run.progress.write_text("100 100000\n")
    assert ", after the time limit" in cli("status", str(run.path)).out


def test_a_run_that_is_over_expects_nothing(run: RunFolder, desk: Desk, cli: Cli) -> None:
    desk.program("scontrol", "#!/bin/bash\necho 'Invalid job id specified' >&2; exit 1\n")
    desk.program("squeue", "#!/bin/bash\nexit 0\n")
    append_event(run.events, "job_ended", attempt=0, job_id="7", exit_code=1, signal="", decision="failed")
    text = cli("status", str(run.path)).out
    assert "step     100 of 1000 (10 %), loss 2" in text and "time     1:00:0" in text
    assert not {line.split()[0] for line in text.splitlines()} & {"ends", "speed", "slow", "stall", "waits"}
    assert cli("status", str(run.path), "--watch").out.count("state    failed") == 1


def test_watching_without_a_terminal_is_a_line_per_change(run: RunFolder, cli: Cli, desk: Desk) -> None:
    desk.program("scontrol", "#!/bin/bash\necho 'Invalid job id specified' >&2; exit 1\n")
    desk.program("squeue", "#!/bin/bash\nexit 0\n")
    append_event(run.events, "job_ended", attempt=0, job_id="7", exit_code=0, signal="", decision="done")
    first, *rest = cli("status", str(run.path), "--watch").out.splitlines()
    assert first.split(" ", 1)[1] == "done, step 100 of 1000 (10 %), loss 2" and rest[0] == "run      gpt-1"
    (line,) = cli("status", str(run.path), "--watch", "--json").out.splitlines()
    assert json.loads(line)["state"] == "done"


#: A line of the text exposition format, as far as slurmddp writes it: name, labels, value.
SAMPLE = re.compile(r'([a-z_]+)\{((?:[a-z_]+="(?:[^"\\\n]|\\[\\"n])*",?)+)\} (\S+)')


def test_metrics_for_prometheus(run: RunFolder, cli: Cli) -> None:
    done = cli("status", str(run.path), "--prometheus")
    assert done.code == 3
    values = {}
    for line in done.out.splitlines():
        if line.startswith("# "):
            assert re.fullmatch(r"# HELP slurmddp_\w+ [^\\]+|# TYPE slurmddp_\w+ (gauge|counter)", line)
            continue
        found = SAMPLE.fullmatch(line)
        assert found and found[2] == 'run="gpt-1",site="",job_id="7"', line
        values[found[1]] = float(found[3])
    assert done.out.count("# TYPE") == done.out.count("# HELP") == len(values) == len(METRICS)
    assert 0 < values.pop("slurmddp_goodput_ratio") < 1
    assert abs(values.pop("slurmddp_metrics_timestamp_seconds") - time.time()) < 600
    assert values == {
        "slurmddp_going": 1, "slurmddp_step": 100, "slurmddp_steps": 1000, "slurmddp_loss": 2.0,
        "slurmddp_samples_per_second": 512.0, "slurmddp_restarts_total": 0,
    }  # fmt: skip


def test_the_file_for_prometheus_is_replaced_whole_and_labels_are_escaped(run: RunFolder, cli: Cli) -> None:
    facts = {"schema": 1, "run": "gpt-1", "created": "2026-01-01T00:00:00+00:00", "site": 'a "b"\\c\nd\udcff'}
    run.manifest.write_text(json.dumps(facts))
    file = run.path / "gpt.prom"
    file.write_text("old")
    before = file.stat().st_ino
    assert cli("status", str(run.path), "--prometheus", "-o", str(file)).out == ""
    assert r'slurmddp_step{run="gpt-1",site="a \"b\"\\c\nd?",job_id="7"} 100' in file.read_text().splitlines()
    assert file.stat().st_ino != before and file.stat().st_mode & 0o777 == 0o644
    assert all(line.startswith("# ") or SAMPLE.fullmatch(line) for line in file.read_text().splitlines())
    for words in (["--prometheus", "--json"], ["--prometheus", "--watch"], ["-o", "x"]):
        assert cli("status", str(run.path), *words).code == 2
    assert cli("status", str(run.path), "--prometheus", "-o", "/no/such/x.prom").code == 1


def test_lines_that_make_no_sense_are_no_progress(run: RunFolder) -> None:
    facts = evidence(run)
    run.progress.write_text("x y")
    rows = [Metrics(5, 2.0), Metrics(5, 3.0, figures={"loss": "y", "x_per_second": None})]
    for count in range(3):
        found = find_progress(run, facts, None, rows[:count], running=True)
        assert found.ends is None and found.speed == {} and found.network is None
        assert progress_lines(found, going=True)
    assert progress_lines(Progress(), going=True) == []


@pytest.mark.parametrize(("reason", "told"), [("Priority", True), ("JobHeldUser", False)])
def test_a_job_that_is_held_has_no_start_time(run: RunFolder, reason: str, told: bool) -> None:
    view = JobView("PENDING", reason, 0, start="2031-05-01T18:30:00")
    assert (find_progress(run, evidence(run), view, [], running=False).starts is not None) is told


@pytest.mark.parametrize(
    ("text", "nodes"),
    [("n1", 1), ("n1 n2", 2), ("n[1-3,7] login", 5), ("r[1-2]n[01-10],x", 21), ("", 0), ("n[", 1), ("n[a-b]", 1)],
)
def test_nodes_are_counted(text: str, nodes: int) -> None:
    assert count_nodes(text) == nodes


def test_a_curve_is_the_mean_of_its_parts_and_later_lines_count() -> None:
    told = ((1, 9.0), (2, 8.0), (1, 0.0), (3, 7.0), (4, None))
    rows = [Metrics(step, figures={"loss": value}) for step, value in told]
    assert by_step(rows, "loss") == [0.0, 8.0, 7.0]
    assert sparkline([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.0, 0.0, 7.0, 7.0], 2) == "▁█"
    assert sparkline([7.0, 7.0], 9) == "▁▁" and sparkline([6.9, 7.0], 9, 0.0) == "██"


def test_reasons_in_plain_words() -> None:
    assert reason_text("Priority") == "others have a higher priority"
    assert reason_text("launch_failed_requeued_held").startswith(
        "its start failed, and Slurm holds it: `scontrol release`"
    )
    assert reason_text("QOSMaxJobsPerUserLimit") == "you use as much as its QOS allows: it starts when other jobs end"
    assert "your account" in reason_text("AssocGrpGRES")
    assert reason_text("ReqNodeNotAvail, UnavailableNodes:n1") == "nodes that it needs are down, drained or reserved"
    assert reason_text("SomethingNew") == "SomethingNew"
    assert waits_text("launch_failed_requeued_held", None).endswith("lets it start (launch_failed_requeued_held)")
    assert waits_text("Priority", None).endswith("; no expected start yet")
    assert [span(seconds) for seconds in (0, 59.6, 3725, 90000)] == ["0:00:00", "0:01:00", "1:02:05", "1 d 1:00:00"]
