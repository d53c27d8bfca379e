"""checkpoint.watch and train.resume_args: where an own script saves, and how it loads that."""

import json
import shlex

import pytest

from slurmddp.errors import UserError
from slurmddp.render.documents import job_yaml
from slurmddp.render.scripts import job_script, node_script
from slurmddp.report.plan import survival_lines
from tests.helpers import LM_JOB, Desk, plan_of

JOB = "name: own\nsite: gpus\ntrain: {script: train.py}\n"
WATCH = "checkpoint.watch=[out, /data/a, '{run}/b', 'logs/*/x.ckpt']"


def settings(text: str) -> dict[str, object]:
    (line,) = [line for line in text.splitlines() if "SLURMDDP_RESUME=" in line]
    return json.loads(shlex.split(line)[1].partition("=")[2].replace("$run", "RUN"))


@pytest.mark.parametrize(("workdir", "there"), [("submit", "PROJECT"), ("run", "RUN/work"), ("/data", "/data")])
def test_paths_start_where_the_script_runs(desk: Desk, workdir: str, there: str) -> None:
    plan = desk.plan(JOB, WATCH, f"train.workdir={workdir}", "train.resume_args=[--resume, '{checkpoint}']")
    there = there.replace("PROJECT", str(desk.project))
    found = settings(node_script(plan))
    assert found["watch"] == [f"{there}/out", "/data/a", "RUN/b", f"{there}/logs/*/x.ckpt"]
    assert found["args"] == ["--resume", "{checkpoint}"]
    (line,) = [line for line in survival_lines(plan) if line.startswith("time limit")]
    saved = f"RUN/checkpoints or {there}/out or /data/a or RUN/b or {there}/logs/*/x.ckpt"
    assert f"saved to {saved} in this job" in line


def test_the_supervisor_looks_where_the_binds_lead(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMDDP_SUPERVISOR", "python")
    plan = desk.plan(JOB, WATCH, "container.binds=['/scratch/me:/data']")
    (line,) = [line for line in job_script(plan).splitlines() if line.startswith("  watch=")]
    assert "/scratch/me/a" in line and '"$run"' in line and "/data/a" in settings(node_script(plan))["watch"]


@pytest.mark.parametrize(
    ("job", "option", "message"),
    [
        (LM_JOB, "train.resume_args=[--resume]", "has resume_args, but only a script needs them"),
        (LM_JOB, "checkpoint.watch=[out]", "has checkpoint.watch, which is for your own script"),
        (JOB, "checkpoint.watch=['a/{run}']", "may have {run} only as its first folder"),
    ],
)
def test_what_cannot_be(desk: Desk, job: str, option: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        desk.plan(job, option)
    assert message in str(caught.value)


def test_with_srun_the_supervisor_knows_where_to_look_and_whether_it_must_find_something(desk: Desk) -> None:
    def saves(*options: str) -> dict[str, object] | None:
        line = next(line for line in job_script(desk.plan(JOB, *options)).splitlines() if line.startswith("  watch="))
        text = shlex.split(line, comments=True)[1].partition("=")[2]
        return json.loads(text.replace("$run", "RUN")) if text else None

    bind = "container.binds=['/scratch/me:/data']"
    found = saves(WATCH, bind, "launch.mode=srun", "train.resume_args=[--resume]")
    assert found is not None and (found["needed"], found["earlier"]) == (True, [])
    assert found["watch"] == [f"{desk.project}/out", "/data/a", "RUN/b", f"{desk.project}/logs/*/x.ckpt"]
    kept_only = saves("launch.mode=srun")
    assert kept_only is not None and not kept_only["needed"]
    assert saves(WATCH, "train.resume_args=[--resume]") is None, "the agents choose for themselves"


def test_the_resolved_job_says_the_same(desk: Desk) -> None:
    resolved = desk.resolve(JOB, WATCH, "train.resume_args=['--x={checkpoint}']")
    plan = desk.plan(job_yaml(resolved, plan_of(resolved, desk.project)))
    assert plan.recovery.watch == desk.plan(JOB, WATCH).recovery.watch
    assert settings(node_script(plan))["args"] == ["--x={checkpoint}"]
