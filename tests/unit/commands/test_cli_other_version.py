"""A run that another version of slurmddp made: cancel works, and the others say how to look."""

import json
import subprocess
from collections.abc import Callable

import pytest

from slurmddp.cluster.local import job_id_of
from slurmddp.records.stop import CANCELLED, StopRequest
from slurmddp.run.events import append_line, read_lines
from tests.helpers import Desk, Result
from tests.unit.commands.test_cli_cancel import Place

Cli = Callable[..., Result]
MADE = "made by slurmddp 0.0.9: its events.jsonl has version 1, and this slurmddp"


@pytest.fixture
def place(desk: Desk) -> Place:
    place = Place(desk)
    facts = {"schema": 1, "schemas": {"events.jsonl": 1}, "slurmddp": "0.0.9", "run": "gpt-1", "name": "gpt"}
    place.run.manifest.write_text(json.dumps({**facts, "directory": str(desk.project)}))
    place.run.events.write_text('{"kind": "begin"}\n')
    return place


def listed(place: Place, job_id: str) -> None:
    entry = {"id": "gpt-1", "path": str(place.run.path), "created": "2026-01-01T00:00:00+00:00", "name": "gpt"}
    append_line(place.home / ".local/state/slurmddp/runs.jsonl", {**entry, "job_id": job_id})


def test_a_running_job_is_asked_to_stop(place: Place, cli: Cli) -> None:
    place.job("7", "RUNNING", NodeList="n1")
    done = cli("cancel", str(place.run.path))
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0].startswith(f"Run gpt-1 was {MADE}")
    assert lines[1].startswith("Job 7 was asked to save and exit (stop file). Unknown: whether its script")
    assert lines[2:] == [
        "To stop without saving: slurmddp cancel gpt-1 --now",
        "Unknown: whether the run has further jobs. To look: squeue --me",
    ]
    assert place.run.stop.read_text() == StopRequest(CANCELLED).text() and place.calls == []
    assert read_lines(place.run.events).records == ({"kind": "begin"},), "its events are not ours to write"


@pytest.mark.parametrize(("state", "options"), [("PENDING", ()), ("RUNNING", ("--now",))])
def test_a_job_is_cancelled_at_once(place: Place, cli: Cli, state: str, options: tuple[str, ...]) -> None:
    place.job("7", state)
    done = cli("cancel", str(place.run.path), *options)
    assert "Cancelled job 7." in done.out.splitlines()
    assert place.calls == ["scancel --verbose 7"] and place.run.stop.exists()


def test_a_job_that_is_over(place: Place, cli: Cli) -> None:
    done = cli("cancel", str(place.run.path), "--wait")
    assert done.code == 0 and "Job 7 was already over." in done.out and "Job 7 is over." in done.out
    assert place.calls == [] and not place.run.stop.exists()


def test_inside_an_allocation_the_job_stays(place: Place, cli: Cli) -> None:
    place.sent("7", "allocation")
    place.job("7", "RUNNING")
    assert "runs inside job 7, so --now cannot cancel it" in cli("cancel", str(place.run.path), "--now").err
    assert "Run gpt-1 inside job 7 was asked to save" in cli("cancel", str(place.run.path)).out
    assert place.calls == [] and place.run.stop.exists()


def test_the_index_knows_the_job_of_a_submission_that_cannot_be_read(place: Place, cli: Cli) -> None:
    place.run.submission.write_text('{"number": 7}')
    refused = cli("cancel", str(place.run.path))
    assert refused.code == 2 and "Its job is not known" in refused.err and "squeue --me" in refused.err
    listed(place, "8")
    place.job("8", "PENDING")
    assert "Cancelled job 8." in cli("cancel", "--yes").out, "as the last run of this folder"


def test_a_job_of_this_machine_is_waited_for(place: Place, cli: Cli) -> None:
    script = f"until [[ -e {place.run.stop} ]]; do sleep 0.05; done"
    child = subprocess.Popen(["bash", "-c", script], start_new_session=True)
    try:
        job_id = job_id_of(child.pid)
        place.sent(str(job_id), "local")
        done = cli("cancel", str(place.run.path), "--wait")
        assert done.out.splitlines()[-1] == f"Job {job_id} is over." and child.wait() == 0
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize(
    ("state", "told"),
    [("RUNNING", "Slurm says that its job 7 is RUNNING on n1"), ("", "Slurm no longer knows its job 7")],
)
def test_status_says_what_slurm_says(place: Place, cli: Cli, state: str, told: str) -> None:
    if state:
        place.job("7", state, NodeList="n1")
    refused = cli("status", str(place.run.path))
    assert refused.code == 2 and MADE in refused.err and told in refused.err
    assert "`slurmddp cancel gpt-1` works" in refused.err


def test_logs_says_where_they_are(place: Place, cli: Cli) -> None:
    refused = cli("logs", str(place.run.path))
    assert refused.code == 2 and MADE in refused.err and f"read its logs in {place.run.logs}" in refused.err


def test_the_list_counts_them(place: Place, cli: Cli) -> None:
    listed(place, "7")
    done = cli("runs")
    assert done.code == 0 and done.out == "no runs\n"
    assert "note: not shown: 1 run of other versions of slurmddp" in done.err
