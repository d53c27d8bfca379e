"""A run folder that version 0.1.0 wrote before keys were renamed: every command still reads it.

`older/` holds one as it was written, but for its paths, its scripts and code, and its checkpoints.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from slurmddp.launch.find import find_run
from slurmddp.launch.prepare import Request, prepare
from slurmddp.runs.evidence import evidence
from slurmddp.runs.layout import RunFolder
from tests.checkpoints import make_checkpoint
from tests.helpers import Desk, Result

Cli = Callable[..., Result]

NAME = "old-20261123-073106-8yhg"
RECORDED = "/home/ada/demo"


@pytest.fixture
def run(desk: Desk) -> RunFolder:
    """The run folder on the desk, as if it had run there, with the site file that its job names."""
    folder = desk.project / "runs" / NAME
    shutil.copytree(Path(__file__).parent / "older" / NAME, folder)
    for path in folder.rglob("*"):
        if path.is_file():
            path.write_text(path.read_text().replace(RECORDED, str(desk.project)))
    make_checkpoint(folder / "checkpoints", 4)
    desk.write("site.yaml", "name: desk\ntitle: A desk\nscheduler: local\ngpu_vendor: none\n")
    desk.write("data/a.txt", "text")
    return RunFolder(folder)


def test_it_holds_the_old_names(run: RunFolder) -> None:
    assert "\n  every: 600s\n" in run.job_yaml.read_text() and "\n    held_out: 0.1\n" in run.job_yaml.read_text()
    assert "\n  not_finite: null\n  agree_every: 100\n" in run.job_yaml.read_text()
    assert "\ndeadman:\n" in run.site_yaml.read_text()
    assert json.loads(run.manifest.read_text())["schemas"]["job.json"] == 2


def test_resume(run: RunFolder, desk: Desk) -> None:
    prepared = prepare(Request(None, resume=str(run.path), environment=desk.environment))
    job = prepared.resolved.job
    assert (job.checkpoint.interval, job.checkpoint.every_steps, job.train.evaluate.every_steps) == (600, 2, 2)
    assert job.train.data["validation_fraction"] == 0.1
    assert (job.train.on_nonfinite, job.train.replica_check_every) == (None, 100)
    assert prepared.resumed_from == (run.path,)
    assert prepared.plan.runtime_job is not None
    assert prepared.plan.runtime_job["train"]["evaluate"]["every_steps"] == 2


def test_its_own_site_is_read(run: RunFolder, desk: Desk) -> None:
    options = [("site", str(run.site_yaml), "--site")]
    site = prepare(Request(None, options=options, resume=str(run.path), environment=desk.environment)).resolved.site
    assert site.watchdog is not None and site.watchdog.partition == "small"


def test_commands(run: RunFolder, cli: Cli) -> None:
    planned = cli("plan", "--resume", NAME)
    assert planned.code == 0, planned.err
    explained = cli("plan", "--resume", NAME, "--explain", "checkpoint.interval")
    assert explained.out.startswith("checkpoint.interval = 600s\n  job file: "), explained
    status = cli("status", str(run.path))
    assert status.code == 0 and "done" in status.out, status
    spent = json.loads(cli("goodput", str(run.path), "--json").out)
    assert spent["seconds"]["evaluation"] > 0
    assert cli("checkpoint", "list", str(run.path)).code == 0


def test_export_prepares_the_runs_own_environment(run: RunFolder, cli: Cli, desk: Desk) -> None:
    (desk.project / "site.yaml").unlink()  # the run folder has the profile as it was
    done = cli("checkpoint", "export", str(run.path), "-o", "out.pt")
    assert f"exporting step 4 of run {NAME} in the environment of " in done.err
    assert "renamed" not in done.err


def test_markers_and_events(run: RunFolder) -> None:
    facts = evidence(find_run(str(run.path), {}))
    assert facts.marker is not None and (facts.marker.state, facts.marker.step) == ("done", 4)
    assert facts.notes == ()
