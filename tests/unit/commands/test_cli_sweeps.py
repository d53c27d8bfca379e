"""`slurmddp sweep`: its points, what it refuses, what it submits, what it says of the runs. sbatch is a stand-in."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurmddp.commands.sweep.points import read_points
from tests.helpers import Desk, Result, append_event

Cli = Callable[..., Result]

#: Counts up the job ids. Refuses the job of the number in HOME/refuse; knows no answer for that in HOME/silent.
SBATCH = """#!/bin/bash
number=$(($(cat "$HOME/number" 2>/dev/null || echo 0) + 1)); echo $number >"$HOME/number"
if [[ $number == "$(cat "$HOME/refuse" 2>/dev/null)" ]]; then echo "sbatch: error: no such account" >&2; exit 1; fi
if [[ $number == "$(cat "$HOME/silent" 2>/dev/null)" ]]; then
  echo "sbatch: error: Unable to contact slurm controller (connect failure)" >&2; exit 1; fi
echo "$TOKEN${SECRET-}" >>"$HOME/inherited"
echo $number
"""
JOB = """\
name: gpt
site: cores
resources: {time: 1h, account: a}
train: {task: lm, data: {path: data}, batch: {global: 4}}
"""


@pytest.fixture(autouse=True)
def cluster(desk: Desk) -> None:
    desk.program("sbatch", SBATCH)
    for name in ("squeue", "scontrol", "sacct"):
        desk.program(name, "#!/bin/bash\n")
    (desk.project / "data").mkdir()
    desk.write("data/a.txt", "text")
    desk.write("job.yaml", JOB)
    desk.write("train.py", "")


GRID = ("--grid", "train.optimizer.lr=1e-3,3e-4", "--grid", "train.seed=0..1")


def folder_of(desk: Desk) -> Path:
    (found,) = (desk.project / "runs").iterdir()
    return found


def run_of(desk: Desk, name: str) -> Path:
    return sorted(folder_of(desk).glob(f"{name}-2*"))[-1]


def end(run: Path, state: str, *evaluated: tuple[int, float]) -> None:
    """Write what a run leaves that has ended."""
    append_event(run / "events.jsonl", event="job_started", attempt=0, job_id="1", nodes="n1")
    for step, loss in evaluated:
        append_event(run / "events.jsonl", event="evaluated", attempt=0, step=step, loss=loss)
    code, decision = (0, "done") if state == "done" else (1, "failed")
    append_event(
        run / "events.jsonl", event="job_ended", attempt=0, exit_code=code, signal="", decision=decision, job_id="1"
    )


# --- points


def test_each_point_is_a_run_of_its_own_with_its_values(desk: Desk, cli: Cli) -> None:
    done = cli("sweep", "job.yaml", *GRID)
    assert done.code == 0, done.err
    folder = folder_of(desk)
    told = json.loads((folder / "sweep.json").read_text())
    assert [point["values"] for point in told["points"]] == [
        {"train.optimizer.lr": lr, "train.seed": seed} for lr in ("1e-3", "3e-4") for seed in ("0", "1")
    ]
    for number, lr, seed in ((1, 0.001, 0), (2, 0.001, 1), (3, 0.0003, 0), (4, 0.0003, 1)):
        train = json.loads((run_of(desk, f"gpt-{number}") / "job.json").read_text())["train"]
        assert (train["optimizer"]["lr"], train["seed"]) == (lr, seed)
    assert done.out.count("run     gpt-") == 4 and f"slurmddp sweep status {folder.name}" in done.err
    assert "cost: up to 1 node-hours (1 x 01:00:00), no GPUs, for each of 4 points" in done.err
    assert "=singleton" not in (run_of(desk, "gpt-1") / "job.sh").read_text()


def test_rows_of_a_table_and_arguments_of_a_script(desk: Desk, cli: Cli) -> None:
    desk.write("points.csv", 'args.lr,train.seed,args.layers\n1e-3, 3 ,\n\n3e-4,,"[1,2]"\n')
    done = cli("sweep", "train.py", "--site", "cores", "--time", "1h", "--rows", "points.csv", "--", "--epochs", "2")
    assert done.code == 0, done.err
    first, second = ((run_of(desk, f"project-train-{number}") / "job.yaml").read_text() for number in (1, 2))
    assert (
        "  - --epochs\n  - '2'\n  - --lr=1e-3\n  resume_args: []\n  observe" in first.replace('"2"', "'2'")
        and "seed: 3\n" in first
    )
    assert "- --lr=3e-4\n  - --layers=[1,2]\n" in second and "seed: 0\n" in second


@pytest.mark.parametrize(
    ("options", "workdir"),
    [((), "run"), (("--workdir", "submit"), "submit"), (("--grid", "train.workdir=/tmp"), "/tmp")],
)
def test_points_of_a_script_run_in_folders_of_their_own(
    desk: Desk, cli: Cli, options: tuple[str, ...], workdir: str
) -> None:
    desk.write("data.csv", "")
    common = ("--site", "cores", "--time", "1h", "--grid", "args.lr=1,2", *options)
    done = cli("sweep", "train.py", *common, "--", "--data=data.csv")
    assert done.code == 0, done.err
    names = ("project-train-1", "project-train-2")
    texts = [(run_of(desk, name) / "job.yaml").read_text() for name in names]
    assert all(f"workdir: {workdir}\n" in text for text in texts)
    assert ("data.csv is relative and exists" in done.err) == (workdir != "submit")
    assert ("in      RUN_FOLDER/work" in done.err) == (workdir == "run")
    for name in names:
        end(run_of(desk, name), "failed")
    old = set(folder_of(desk).glob(f"{names[0]}-2*"))
    assert cli("sweep", "rerun", "last").code == 0
    (again,) = set(folder_of(desk).glob(f"{names[0]}-2*")) - old
    assert f"workdir: {workdir}\n" in (again / "job.yaml").read_text()


def test_a_value_with_a_comma_stands_in_double_quotes(cli: Cli) -> None:
    options = ("--site", "cores", "--time", "1h", "--dry-run", "--grid", 'args.layers="[1,2]", -1..1')
    done = cli("sweep", "train.py", *options)
    shown = [line.partition("args.layers=")[2] for line in done.out.splitlines()[:4]]
    assert shown == ["[1,2]", "-1", "0", "1"] and "--layers=[1,2]" in done.out


def test_at_most_makes_queues_of_which_slurm_runs_one_job_at_a_time(desk: Desk, cli: Cli) -> None:
    desk.write("job.yaml", JOB.replace("account: a", "sbatch_extra: [--comment=mine]"))
    assert cli("sweep", "job.yaml", *GRID, "--at-most", "3").code == 0
    queues = []
    for number in range(1, 5):
        lines = (run_of(desk, f"gpt-{number}") / "job.sh").read_text().splitlines()
        assert "#SBATCH --dependency=singleton" in lines and "#SBATCH --comment=mine" in lines
        queues.append([line for line in lines if line.startswith("#SBATCH --job-name=")][-1])
    assert queues == [f"#SBATCH --job-name={folder_of(desk).name}-{number}" for number in (1, 2, 3, 1)]


def test_a_dry_run_lists_the_points_and_writes_nothing(desk: Desk, cli: Cli) -> None:
    before = desk.tree()
    done = cli("sweep", "job.yaml", *GRID, "--dry-run")
    assert done.code == 0 and desk.tree() == before
    lines = done.out.splitlines()
    assert lines[0] == "gpt-1  train.optimizer.lr=1e-3  train.seed=0" and lines[3].startswith("gpt-4  ")
    assert lines[5] == "the first of 4:" and lines[6].startswith("site      cores")
    told = json.loads(cli("sweep", "job.yaml", *GRID, "--dry-run", "--json").out)
    assert told["points"][3] == {"name": "gpt-4", "values": {"train.optimizer.lr": "3e-4", "train.seed": "1"}}
    assert told["first"]["name"] == "gpt-1"
    done = cli("sweep", "-m", "pkg.train", "--site", "cores", "--grid", "args.lr=1,2", "--dry-run", "--", "fast")
    assert "program   torchrun -m pkg.train fast --lr=1\ndirectory RUN_FOLDER/work, " in done.out, done.err


# --- what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "a sweep needs either --grid or --rows"),
        ((*GRID, "--rows", "a.csv"), "a sweep needs either --grid or --rows"),
        (("--grid", "train.seed"), "is not KEY=VALUES"),
        (("--grid", "=1"), "has an empty key"),
        (("--grid", "args.=1"), "has an empty key"),
        (("--grid", "train.seed="), "has an empty value"),
        (("--grid", "train.seed=1,,2"), "has an empty value"),
        (("--grid", "train.seed=4..0"), "the range 4..0, which has no or too many values"),
        (("--grid", "train.seed=0..99999999999"), "no or too many values"),
        (("--grid", "train.seed=0..1000"), "1001 points, more than 1000\n  -> to submit all of them, add --yes"),
        (("--grid", "train.seed=0..999", "--grid", "train.steps=1,2"), "2000 points"),
        (("--grid", "train.seed=1", "--grid", "train.seed=2"), "names train.seed twice"),
        (("--grid", "train.seed=1,2,1"), "two points are the same: train.seed=1"),
        (("--grid", "name=a,b"), "name cannot differ between the points"),
        (("--grid", "train.seeed=1,2"), "train.seeed"),
        (("--grid", "train.optimizer=1", "--grid", "train.optimizer.lr=1"), "train.optimizer"),
        (("--grid", "train.seed=1,x"), "point 2 of 2 (train.seed=x): "),
        (("--grid", "train.data.path=data,nothing"), "point 2 of 2 (train.data.path=nothing): "),
        (("--grid", "args.lr=1,2"), "only a script can have args"),
        ((*GRID, "--site", "here"), "site here has no queue, so all 4 points would start at once"),
        ((*GRID, "--at-most", "2", "--set", "resources.sbatch_extra=[--dependency=afterok:7]"), "--at-most cannot be"),
        (("--rows", "no.csv"), "no.csv: cannot be read: No such file"),
    ],
)
def test_a_sweep_that_cannot_be_is_one_message(desk: Desk, cli: Cli, options: tuple[str, ...], message: str) -> None:
    before = desk.tree()
    done = cli("sweep", "job.yaml", *options)
    assert (done.code, done.out) == (2, "") and message in done.err, done.err
    assert done.err.count("slurmddp: ") == 1 and desk.tree() == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "points.csv: is empty"),
        ("train.seed\n", "points.csv: has no rows below its header"),
        ("train.seed,train.seed\n1,2\n", "points.csv:1: names train.seed twice"),
        ("train.seed,\n1,2\n", "points.csv:1: has an empty key"),
        ("train.seed,train.steps\n1,\n2\n", "points.csv: no row has a value for the column train.steps"),
        ("train.seed\n1,2\n", "points.csv:2: has 2 cells for 1 keys"),
        ("train.seed,train.steps\n1,2\n,\n", "points.csv:3: has only empty cells"),
        ("train.seed\n1\n\n1\n", "points.csv:2 and points.csv:4 are the same: train.seed=1"),
        ("train.seed\n1\nx\n", "points.csv:3: train.seed"),
        ('train.seed\n"1\n', "is not a CSV file in UTF-8"),
        ("args.lr,train.args\n1,[a]\n", "points.csv:2: sets train.args and args.OPTION"),
        ("train.seed,train.model\n1,[2\n", "points.csv:2"),
    ],
)
def test_a_table_that_cannot_be_is_one_message(desk: Desk, cli: Cli, text: str, message: str) -> None:
    desk.write("points.csv", text)
    done = cli("sweep", "job.yaml", "--rows", "points.csv")
    assert (done.code, done.out) == (2, "") and message in done.err, done.err
    assert not (desk.project / "runs").exists()


def test_a_job_that_is_not_there(cli: Cli) -> None:
    done = cli("sweep", "statsu", "--grid", "train.seed=1,2")
    assert done.code == 2 and "statsu: is neither a job file" in done.err


# --- what Slurm refuses


def test_nothing_stays_of_a_sweep_whose_first_point_is_refused(desk: Desk, cli: Cli) -> None:
    (desk.home / "refuse").write_text("1")
    done = cli("sweep", "job.yaml", *GRID)
    assert done.code == 2 and "gpt-1 was not submitted (submitted before it: nothing)" in done.err
    assert "no such account" in done.err and "sweep rerun" not in done.err
    assert not any((desk.project / "runs").rglob("*"))


def test_a_refusal_in_the_middle_says_what_was_submitted_and_is_continued(desk: Desk, cli: Cli) -> None:
    (desk.home / "refuse").write_text("3")
    done = cli("sweep", "job.yaml", *GRID, "--at-most", "2")
    folder = folder_of(desk)
    assert done.code == 2 and "gpt-3 was not submitted (submitted before it: gpt-1, gpt-2)" in done.err
    assert f"`slurmddp sweep rerun {folder.name}` submits the rest" in done.err
    for name in ("gpt-1", "gpt-2"):
        end(run_of(desk, name), "done")
    shown = cli("sweep", "status")
    assert shown.code == 1 and "2 done, 2 not submitted" in shown.out
    # The job file of today has no part in it: the points are those of the sweep.
    desk.write("job.yaml", JOB.replace("global: 4", "global: 8"))
    done = cli("sweep", "rerun", "last", "--json")
    assert [each["name"] for each in json.loads(done.out)["submitted"]] == ["gpt-3", "gpt-4"], done.err
    job = json.loads((run_of(desk, "gpt-4") / "job.json").read_text())
    assert (job["train"]["optimizer"]["lr"], job["train"]["seed"]) == (0.0003, 1)
    assert "global: 4\n" in (run_of(desk, "gpt-4") / "job.yaml").read_text()
    assert f"--job-name={folder.name}-2\n" in (run_of(desk, "gpt-4") / "job.sh").read_text()


def test_a_point_that_may_be_in_the_queue_is_not_submitted_twice(desk: Desk, cli: Cli) -> None:
    (desk.home / "silent").write_text("2")
    done = cli("sweep", "job.yaml", *GRID)
    assert done.code == 1 and "the job may be in the queue anyway" in done.err and "sweep rerun" in done.err
    assert "gpt-2 may not have been submitted (submitted before it: gpt-1)" in done.err
    end(run_of(desk, "gpt-1"), "done")
    done = cli("sweep", "rerun", "--json")
    assert [each["name"] for each in json.loads(done.out)["submitted"]] == ["gpt-3", "gpt-4"]
    assert "gpt-2 may be in the queue, because sbatch did not answer: check squeue" in done.err


def test_every_point_gets_the_secrets_and_no_sbatch_inherits_them(desk: Desk, cli: Cli) -> None:
    desk.write("job.yaml", JOB + "environment_from: [TOKEN]\n")
    assert cli("sweep", "job.yaml", "--grid", "train.seed=0..2", TOKEN="hunter2hunter2").code == 0
    kept = list((desk.config / "secrets").glob("*/.environment"))
    assert len(kept) == 3 and all(path.read_bytes() == b"TOKEN=hunter2hunter2\0" for path in kept)
    assert (desk.home / "inherited").read_text() == "\n\n\n"


# --- status, rerun, best


def test_what_failed_is_run_again_and_the_best_is_found(desk: Desk, cli: Cli) -> None:
    assert cli("sweep", "job.yaml", *GRID, "--at-most", "2").code == 0
    end(run_of(desk, "gpt-1"), "done", (10, 3.0), (20, 2.5))
    append_event(
        run_of(desk, "gpt-2") / "events.jsonl", event="error", attempt=0, rank=0, kind="ValueError", message="bad"
    )
    end(run_of(desk, "gpt-2"), "failed", (10, 2.0))
    end(run_of(desk, "gpt-3"), "done", (10, 2.1), (20, 2.3))
    end(run_of(desk, "gpt-4"), "done", (10, float("nan")))
    shown = cli("sweep", "status")
    assert shown.code == 1 and "3 done, 1 failed" in shown.out and "at most 2 at once" in shown.out
    assert shown.out.splitlines()[3].split()[:4] == ["gpt-2", "1e-3", "1", "failed"]
    assert "ValueError: bad" in shown.out.splitlines()[4]
    failed = run_of(desk, "gpt-2")
    assert cli("sweep", "rerun").out.startswith("run     gpt-2-")
    again = next(path for path in folder_of(desk).glob("gpt-2-*") if path != failed)
    manifest = json.loads((again / "manifest.json").read_text())
    (again / "manifest.json").write_text(json.dumps({**manifest, "created": "2099-01-01T00:00:00+00:00"}))
    end(again, "done", (10, 2.2))
    told = json.loads(cli("sweep", "status", "--json").out)
    assert [point["state"] for point in told["points"]] == ["done"] * 4 and cli("sweep", "status").code == 0
    assert told["points"][1]["run"]["run_id"] == again.name
    best = cli("sweep", "best", "--metric", "validation_loss")
    assert [line.split()[0] for line in best.out.splitlines()[1:]] == ["gpt-3", "gpt-2", "gpt-1"]
    assert (
        best.out.splitlines()[1].split()[3:5] == ["2.1", "10"] and "1 of 4 points have no validation_loss" in best.err
    )
    worst = json.loads(cli("sweep", "best", "--metric", "validation_loss", "--max", "--json").out)
    assert (worst["best"]["name"], worst["best"]["value"], worst["best"]["step"]) == ("gpt-1", 3.0, 10)
    assert "nothing to submit" in cli("sweep", "rerun").err
    listed = json.loads(cli("runs", "--json", "--sweep", "last").out)
    assert len(listed) == 5
    refused = cli("sweep", "best", "--metric", "accuracy")
    assert refused.code == 2 and "no point of the sweep has the metric 'accuracy'" in refused.err
    assert "metrics: validation_loss" in refused.err


def test_metrics_of_an_own_script(desk: Desk, cli: Cli) -> None:
    assert cli("sweep", "job.yaml", "--grid", "train.seed=0,1").code == 0
    for number, value in ((1, 0.5), (2, 0.25)):
        lines: list[dict[str, Any]] = [{"step": 3, "error": value}, {"step": 4, "error": "n/a"}, {"error": True}]
        (run_of(desk, f"gpt-{number}") / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    told = json.loads(cli("sweep", "best", "--metric", "error", "--json").out)
    assert [(each["name"], each["value"], each["step"]) for each in told["points"]] == [
        ("gpt-2", 0.25, 3),
        ("gpt-1", 0.5, 3),
    ]


def test_a_sweep_is_found_by_its_names(desk: Desk, cli: Cli) -> None:
    assert cli("sweep", "status").code == 2
    assert "no sweep 'last'; the newest: none" in cli("sweep", "status").err
    for _ in range(2):
        assert cli("sweep", "job.yaml", "--grid", "train.seed=0,1").code == 0
    folders = list((desk.project / "runs").iterdir())
    for name in (folders[0].name, folders[0].name[:-1], f"runs/{folders[0].name}"):
        assert json.loads(cli("sweep", "status", name, "--json").out)["sweep"] == folders[0].name
    assert "'gpt' matches 2 sweeps" in cli("sweep", "status", "gpt").err
    (folders[0] / "sweep.json").write_text("{}")
    done = cli("sweep", "status", folders[0].name)
    assert done.code == 2 and "sweep.json: is damaged" in done.err
    (desk.home / ".local/state/slurmddp/runs.jsonl").unlink()
    assert json.loads(cli("sweep", "status", folders[1].name, "--json").out)["sweep"] == folders[1].name


def test_a_point_that_was_cancelled_waits_for_its_user(desk: Desk, cli: Cli) -> None:
    assert cli("sweep", "job.yaml", "--grid", "train.seed=0,1", "--at-most", "1").code == 0
    end(run_of(desk, "gpt-2"), "done")
    cancelled = run_of(desk, "gpt-1")
    append_event(cancelled / "events.jsonl", event="job_started", attempt=0, job_id="1", nodes="n1")
    append_event(cancelled / "events.jsonl", event="cancel_requested", job_id="1", now=True)
    append_event(cancelled / "events.jsonl", event="job_ended", attempt=0, exit_code=1, signal="", decision="stopped")
    shown = cli("sweep", "status")
    assert (shown.code, "1 cancelled, 1 done" in shown.out, "sweep rerun" in shown.out) == (1, True, False)
    done = cli("sweep", "rerun")
    assert f"gpt-1 is cancelled: `slurmddp rerun {cancelled.name}`" in done.err and "nothing to submit" in done.err
    # By hand, its next run is in the sweep, too, and in its queue.
    assert cli("rerun", cancelled.name).code == 0
    again = next(path for path in folder_of(desk).glob("gpt-1-*") if path != cancelled)
    assert f"--job-name={folder_of(desk).name}-1\n" in (again / "job.sh").read_text()


def test_many_points_for_who_means_it() -> None:
    assert len(read_points(["train.seed=0..1000"], None, many=True)) == 1001
