"""train.workdir and {run}: where an own script runs, and what becomes of its arguments."""

import subprocess
from pathlib import Path

import pytest

from slurmddp.errors import UserError
from slurmddp.launch.workdir import relative_paths
from slurmddp.render.documents import job_yaml
from slurmddp.render.engine import quote_run
from slurmddp.render.per_node import node_commands
from slurmddp.report.plan import workdir_text
from tests.helpers import Desk, plan_of

JOB = "name: own\nsite: here\ntrain: {script: train.py}\n"


@pytest.fixture(autouse=True)
def script(desk: Desk) -> None:
    desk.write("train.py", "")


@pytest.mark.parametrize(
    ("workdir", "there"),
    [
        (None, "PROJECT"),
        ("submit", "PROJECT"),
        ("run", "{run}/work"),
        ("{run}", "{run}"),
        ("{run}/a b", "{run}/a b"),
        ("/data/$NAME/", "/data/x"),
        ("$HOME/out", "HOME/out"),
        ("~/out", "HOME/out"),
        ("src", "PROJECT/src"),
        ("./run", "PROJECT/run"),
        ("$REL/../out", "PROJECT/out"),
    ],
)
def test_where_the_ranks_run(desk: Desk, workdir: str | None, there: str) -> None:
    options = [] if workdir is None else [f"train.workdir={workdir}"]
    plan = desk.plan(JOB, *options, NAME="x", REL="rel")
    there = there.replace("PROJECT", str(desk.project)).replace("HOME", str(desk.home))
    assert plan.workdir == there


@pytest.mark.parametrize(
    ("workdir", "message"),
    [
        ("~bob/out", "begins with ~bob: write an absolute path"),
        ("-x", "begins with a dash"),
        ("/data/{run}", "only as its first folder"),
        ("{run}x", "only as its first folder"),
    ],
)
def test_a_workdir_that_cannot_be(desk: Desk, workdir: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        desk.plan(JOB, f"train.workdir={workdir}")


def test_a_folder_that_is_not_there_is_named(desk: Desk) -> None:
    (desk.project / "src").mkdir()
    words = ("check", "train.py", "--site", "here", "--workdir")
    assert "working directory" not in (done := desk.command(*words, "src")).out + done.err
    missing = desk.command(*words, "sumbit")
    assert missing.code == 1 and f"the working directory {desk.project}/sumbit does not exist" in missing.out


def test_a_task_has_no_workdir(desk: Desk) -> None:
    with pytest.raises(UserError, match="has workdir, but only a script or a module has one"):
        desk.plan("site: here\ntrain: {task: lm, data: {path: .}, batch: {global: 1}, workdir: run}\n")


@pytest.mark.parametrize("workdir", ["submit", "run", "{run}/x", "/data/x", "src"])
def test_the_resolved_job_says_the_same_from_any_folder(desk: Desk, tmp_path: Path, workdir: str) -> None:
    resolved = desk.resolve(JOB, f"train.workdir={workdir}")
    text = job_yaml(resolved, plan_of(resolved, desk.project))
    written = f"{desk.project}/src" if workdir == "src" else workdir
    assert f"workdir: {written}\n" in text.replace("'", "").replace('"', "")
    again = desk.resolve(text)
    expected = str(tmp_path) if workdir == "submit" else plan_of(resolved, desk.project).workdir
    assert plan_of(again, tmp_path).workdir == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{run}", "/r u/n"),
        ("--out={run}/out it's", "--out=/r u/n/out it's"),
        ("{run}{run}", "/r u/n/r u/n"),
        ("{{run}}", "{run}"),
        ("{}", "{}"),
        ('{"a": 1}', '{"a": 1}'),
        ('{"a":"{run}"}', '{"a":"/r u/n"}'),
        ("${x} $run ${run}", "${x} $run $/r u/n"),
        ("{run }", "{run }"),
        ("", ""),
        ("~", "~"),
    ],
)
def test_run_in_an_argument_is_the_run_folder_and_all_other_braces_stay(text: str, value: str) -> None:
    program = f"run='/r u/n' run_id=x; printf %s {quote_run(text)}"
    assert subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True).stdout == value


def test_node_script_and_lines_for_each_node_name_the_run_folder(desk: Desk) -> None:
    options = ("train.args=[--out, '{run}/out']", "environment.OUT={run}/env", "train.workdir=run")
    node = desk.scripts(JOB, *options)[1]
    assert 'workdir="$run"/work' in node and '"$run"/out' in node and 'OUT="$run"/env' in node
    lines = node_commands(desk.plan(JOB, *options), "n0", 1)
    assert any("mkdir -p RUN_FOLDER/work && cd RUN_FOLDER/work" in line for line in lines)
    assert "RUN_FOLDER/out" in lines[-1] and "OUT=RUN_FOLDER/env" in lines[-1]


def test_a_container_sees_the_working_directory(desk: Desk) -> None:
    job = "name: own\nsite: gpus\nresources: {time: 1h}\ncontainer: {image: i.sif}\ntrain: {script: train.py}\n"
    binds = [bind.spec for bind in desk.plan(job, "train.workdir=/data/x").container.binds]
    assert "/data/x:/data/x:rw" in binds and f"{desk.project}:{desk.project}:rw" in binds
    assert not any("{run}" in bind.spec for bind in desk.plan(job, "train.workdir=run").container.binds)
    assert '--pwd "$workdir"' in desk.scripts(job, "train.workdir=run")[1]


def test_a_script_that_runs_in_place_can_write_where_it_runs(desk: Desk) -> None:
    job = "name: own\nsite: gpus\nresources: {time: 1h}\ncontainer: {image: i.sif}\ntrain: {script: train.py}\n"

    def binds(*options: str) -> list[str]:
        return [bind.spec for bind in desk.plan(job, "snapshot=false", *options).container.binds]

    here = str(desk.project)
    assert binds() == [f"{here}:{here}:rw"]
    # The one mounted last is on top: a folder that is written to, on the one of the code around it.
    assert binds("train.project=..")[-1] == f"{here}:{here}:rw"
    assert binds("train.project=src") == [f"{here}:{here}:rw"]
    assert binds(f"container.binds=['{here}:{here}:ro']") == [f"{here}:{here}:ro"], "as the job says"


def test_plan_says_where_the_script_runs(desk: Desk) -> None:
    assert workdir_text(desk.plan(JOB)) == f"{desk.project}, which runs share (train.workdir: submit)"
    assert workdir_text(desk.plan(JOB, "train.workdir=run")).startswith("RUN_FOLDER/work, where relative paths start")


def test_a_relative_path_that_would_be_looked_for_elsewhere_is_a_warning(desk: Desk) -> None:
    args = "train.args=[--data, ./data, --val=val.txt, --lr, '1e-3', --out, out, '']"
    assert relative_paths(desk.plan(JOB, args, "train.workdir=run")) == []
    desk.write("data/x"), desk.write("val.txt"), desk.write("inside.csv"), desk.write("1e-3x")
    desk.write("train.py", "open('inside.csv'); open('absent.csv'); print('data')")
    assert relative_paths(desk.plan(JOB, args)) == []
    (warning,) = relative_paths(desk.plan(JOB, args, "train.workdir=run"))
    assert warning.startswith(f"./data, val.txt, inside.csv are relative and exist in {desk.project}, but ")
    assert "RUN_FOLDER/work" in warning and "set train.workdir to submit" in warning
    desk.write("run.sh", 'exec python train.py "$@"')
    (warning,) = relative_paths(desk.plan(JOB, "train.script=run.sh", "train.workdir=run"))
    assert warning.startswith(f"train.py is relative and exists in {desk.project}")
