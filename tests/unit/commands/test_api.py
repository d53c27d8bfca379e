"""The Python API: what the commands do, from a program."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import slurmddp
from slurmddp.errors import UserError
from tests.helpers import ROOT, SIF, Desk, Result, append_event

JOB: dict[str, Any] = {
    "name": "gpt",
    "site": "gpus",
    "container": {"image": "image.sif"},
    "resources": {"nodes": 2, "time": "2h"},
    "train": {
        "task": "lm", "data": {"path": Path("books"), "context": 64}, "batch": {"global": 512, "micro": 16},
        "optimizer": {"lr": 3e-4, "betas": (0.9, 0.95)}, "compile": False, "schedule": {"steps": None},
    },
}  # fmt: skip

#: Slurm knows the job until the file `over` is there.
SCONTROL = """#!/bin/bash
[ -e over ] && { echo 'Invalid job id specified' >&2; exit 1; }
echo "JobId=7 JobName=gpt UserId=a(1) JobState=RUNNING Reason=None TimeLimit=04:00:00 NodeList=n[1-2] Features=x"
"""

#: Stands for sbatch: the job is done at once.
DONE = """#!/bin/bash
echo '{"time": 2, "event": "job_ended", "attempt": 0, "exit_code": 0, "decision": "done"}' >>"${!#}/events.jsonl"
echo '{"time": 1, "attempt": 0, "step": 10, "loss": 0.5}' >>"${!#}/metrics.jsonl"
echo 7
"""
#: An indented block of a page.
BLOCK = re.compile(r"(?:^    .*\n(?:\n(?=    ))?)+", re.MULTILINE)


@pytest.fixture
def ready(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """The current directory and environment are those of the desk, where sbatch takes every job."""
    for name in list(os.environ):
        if name not in ("PYTEST_CURRENT_TEST", "TMPDIR"):
            monkeypatch.delenv(name)
    for name, value in desk.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(desk.project)
    desk.write("image.sif", SIF)
    desk.write("books/a.txt", "text")
    desk.program("sbatch", "#!/bin/bash\necho 7\n")
    desk.program("scontrol", SCONTROL)
    desk.program("squeue", "#!/bin/bash\nexit 0\n")
    desk.program("scancel", '#!/bin/bash\necho "$@" >>"$HOME/scancel.argv"\n')
    return desk


def test_a_dict_a_file_and_the_command_make_the_same_job(ready: Desk, cli: Callable[..., Result]) -> None:
    path = ready.write("job.yaml", yaml.safe_dump(json.loads(json.dumps(JOB, default=str))))
    result = cli("submit", "job.yaml", "--json")
    by_command = ready.project / "runs" / json.loads(result.out)["run_id"]
    for job in (JOB, path, str(path)):
        run = slurmddp.submit(job)
        assert (run.folder / "job.sh").read_text() == (by_command / "job.sh").read_text()
        ours, theirs = (json.loads((folder / "job.json").read_text()) for folder in (run.folder, by_command))
        assert {**ours, "run": None} == {**theirs, "run": None}
        assert slurmddp.Run("last").id == run.id and repr(run) == f"slurmddp.Run({run.id!r})"
        assert len(run.warnings) == result.err.count("warning: ")


def test_settings_go_over_the_job_and_the_environment(ready: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMDDP_RESOURCES__NODES", "3")
    settings = {"resources.nodes": 4, "name": "other", "train.data.path": Path("books"), "train.optimizer.lr": 0.1}
    run = slurmddp.submit(JOB, settings=settings)
    job = yaml.safe_load((run.folder / "job.yaml").read_text())
    assert (job["resources"]["nodes"], job["name"], job["train"]["optimizer"]["lr"]) == (4, "other", 0.1)
    job = yaml.safe_load((slurmddp.submit(JOB).folder / "job.yaml").read_text())
    assert job["resources"]["nodes"] == 3


def test_the_secrets_of_the_job_stay_in_the_environment_of_the_program(
    ready: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "abcdefgh12345678")
    for _ in range(2):
        run = slurmddp.submit({**JOB, "environment_from": ["TOKEN"]})
        assert os.environ["TOKEN"] == "abcdefgh12345678"
        assert "abcdefgh" not in (run.folder / "job.yaml").read_text()


@pytest.mark.parametrize(
    ("job", "settings", "message"),
    [
        ({**JOB, "resources": {"nodez": 2}}, {}, "job: resources.nodez: "),
        (JOB, {"resources.nodes": "many"}, "settings: resources.nodes"),
        (JOB, {"nodes": 4}, "settings: nodes"),
        ({**JOB, "train": {1, 2}}, {}, "job: cannot be written as YAML: "),
        ({"site": "gpus", "train": {"on_nonfinit": "stop"}}, {}, "did you mean train.on_nonfinite?"),
        ("none.yaml", {}, "none.yaml: no such file"),
        ({}, {}, "no site selected"),
    ],
    ids=str,
)  # fmt: skip
def test_a_mistake_is_one_message(ready: Desk, job: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        slurmddp.submit(job, settings=settings)
    assert message in str(caught.value) and "''" not in str(caught.value)
    assert not (ready.project / "runs").exists()


def test_a_run_from_its_submission_to_its_end(ready: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    run = slurmddp.submit(JOB)
    assert list(run.metrics()) == []
    append_event(run.folder / "events.jsonl", "job_started", attempt=0, job_id="7", node="n1", nodes="n[1-2]")
    rows = [{"time": 1.0, "attempt": 0, "step": step, "loss": 2.0 / step} for step in (10, 20)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (run.folder / "metrics.jsonl").write_text(text + "no JSON\n" + '{"step": 30, "lo')
    (run.folder / "progress").write_text("20 40\n")
    assert list(run.metrics()) == rows
    status = run.status()
    assert (status.state, status.going, status.job_id) == ("running", True, "7")
    assert (status.step, status.steps, status.loss, status.cause) == (20, 40, 0.1, None)
    assert status.facts["run_id"] == run.id
    with pytest.raises(TimeoutError, match=rf"run {run.id} is still running after 0 s"):
        run.wait(timeout=0)
    run.cancel()
    assert (run.folder / "stop").is_file() and run.status().state == "stopping"

    def end() -> None:
        append_event(run.folder / "events.jsonl", "job_ended", attempt=0, job_id="7", exit_code=0, decision="done")
        time.sleep(1)
        ready.write("over")

    monkeypatch.setattr("slurmddp.api.ASK_AT_END", 0.2)
    timer = threading.Timer(0.2, end)
    timer.start()
    assert run.wait(timeout=60).state == "done"
    timer.join()
    with pytest.raises(UserError, match="no run 'other'"):
        slurmddp.Run("other")


def test_the_program_of_the_page(ready: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs/python.md").read_text()
    first, second = ("\n".join(re.findall("^    (.*)", block, re.MULTILINE)) for block in re.findall(BLOCK, text))
    ready.write("job.yaml", yaml.safe_dump(json.loads(json.dumps(JOB, default=str))))
    ready.program("sbatch", DONE)
    ready.write("over")
    exec(first, {})
    assert re.fullmatch(r"(gpt-\S+) /\S+/\1\ndone 10 0.5\n10 0.5\n", capsys.readouterr().out)
    names: dict[str, Any] = {}
    exec(second, names)
    ready.write("train.py")
    assert slurmddp.submit({**names["job"], "site": "gpus", "container": {"image": "image.sif"}}).folder.is_dir()


def test_importing_the_package_imports_nothing_else() -> None:
    code = (
        "import sys, slurmddp; print(*(name for name in sys.modules if name.startswith('slurmddp'))); "
        "slurmddp.Run; slurmddp.submit; "
        "print(*({'typer', 'yaml', 'pydantic', 'jinja2', 'slurmddp.launch'} & set(sys.modules)))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        check=True,
    ).stdout  # fmt: skip
    assert shown.splitlines() == ["slurmddp", ""], "neither before nor at the first use of a name"
    assert set(slurmddp.__all__) >= {"Run", "Status", "submit"}
    with pytest.raises(AttributeError, match="no attribute 'Runs'"):
        slurmddp.Runs  # type: ignore[attr-defined]  # noqa: B018
