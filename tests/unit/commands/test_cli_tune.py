"""`slurmddp tune`: what it asks of the ranks, what it writes, what it refuses. The ranks are a stand-in."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from slurmddp.commands import tune
from slurmddp.records.tuning import Point, Trial, Tuned
from slurmddp.shared.files import read_json
from tests.helpers import Desk, Result

Cli = Callable[..., Result]

JOB = """\
name: gpt
site: here
resources: {ranks_per_node: 2}
train: {task: lm, data: {path: data}, batch: {global: 16, micro: 1}}
parallel: {tensor: 2}
"""
MEASURED = Tuned(
    "cpu", 16, 0.1, None, 4000, 8000, {"off": 30},
    (Trial(4, False, True, 90.0, 5000), Trial(8, False, True, 99.0, 9000)),
    (
        Point(1, 1, 90.0, "DDP", 8, 2, False, {"backward": 0.1}),
        Point(1, 2, 160.0, "DDP", 8, 1, False, {"backward": 0.1, "network": 0.02}),
        Point(1, 2, 120.0, "FSDP", 8, 1, False, {"backward": 0.1, "network": 0.08}),
    ),
    1000.0, notes=("a note",),
)  # fmt: skip


@pytest.fixture(autouse=True)
def ready(desk: Desk) -> None:
    desk.write("data/a.txt", "text")
    desk.write("job.yaml", JOB)
    desk.write("train.py")
    desk.write("measured.json", json.dumps(MEASURED.write()))
    give(desk, f"cp {desk.project}/measured.json $SLURMDDP_RUN/tuned.json")


def give(desk: Desk, command: str) -> None:
    """Let the ranks do this and no more."""
    desk.program("ranks", f"#!/bin/bash\n[[ $1 == import ]] || {command}\n")
    desk.environment["SLURMDDP_CONTAINER__PYTHON"] = str(desk.bin / "ranks")


def test_a_job_file_with_the_choice_and_its_reasons_is_written(desk: Desk, cli: Cli) -> None:
    done = cli("tune", "job.yaml")
    assert done.code == 0, done.err
    assert "PARALLEL" in done.out and "choice\n  2 ranks: " in done.out and "note: a note" in done.out
    text = (desk.project / "gpt.tuned.yaml").read_text()
    reasons = [line for line in text.splitlines() if line.startswith("# - ")]
    assert reasons[0].startswith("# - 2 ranks: ") and any("DDP, not FSDP: 160 against 120" in each for each in reasons)
    job = desk.resolve_file(desk.project / "gpt.tuned.yaml").job
    assert (job.train.batch.global_, job.train.batch.micro, job.parallel.shard, job.parallel.tensor) == (16, 8, 1, 1)
    assert "note: not measured: tensor parallelism" in done.out
    assert (job.resources.ranks_per_node, job.recovery.requeue, job.timeouts.hang) == (2, "auto", 120)
    assert "Tuning of gpt" in (desk.project / "gpt.tuned.html").read_text()


def test_ranks_are_asked_to_measure_without_shards_and_only_once(desk: Desk, cli: Cli) -> None:
    assert cli("tune", "job.yaml", "--memory", "2G", "--margin", "0.2").code == 0
    (run,) = (desk.project / "runs").iterdir()
    assert read_json(run / "tune.json", run) == {"margin": 0.2, "memory": 2 * 2**30}
    asked = read_json(run / "job.json", run)
    assert run.name.startswith("gpt-tune-")  # `last` and `resume` mean runs of the job
    assert asked["parallel"] == {"replicate": None, "shard": 1, "tensor": 1} and asked["timeouts"]["hang"] is None


def test_json_names_what_was_written(desk: Desk, cli: Cli) -> None:
    done = cli("tune", "job.yaml", "--json", "-o", "other.yaml")
    answer = json.loads(done.out)
    assert (answer["job_file"], answer["page"], answer["beyond"]) == ("other.yaml", "other.html", None)
    assert answer["choice"]["options"]["train.batch.micro"] == "8"


def test_files_that_exist_are_kept_unless_forced(desk: Desk, cli: Cli) -> None:
    desk.write("gpt.tuned.html", "mine")
    refused = cli("tune", "job.yaml")
    assert refused.code == 2 and "gpt.tuned.html exists" in refused.err
    assert not (desk.project / "runs").exists()
    assert cli("tune", "job.yaml", "--force").code == 0
    assert "Tuning" in (desk.project / "gpt.tuned.html").read_text()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("job.yaml", "--memory", "8"), "--memory '8' must be an amount of memory with a unit"),
        (("job.yaml", "-o", "a.html"), "choose a name that ends in .yaml"),
        (("job.yaml", "-o", "missing/a.yaml"), "cannot write into missing"),
        (("job.yaml", "-o", "tuned"), "-o tuned is no name of a job file"),
        (("missing.yaml",), "missing.yaml"),
        (("train.py", "--memory", "8G"), "--memory and a script cannot be combined"),
        (("job.yaml", "--set", "train.batch.micro=x"), "train.batch.micro"),
    ],
)
def test_mistakes_are_told_before_anything_runs(desk: Desk, cli: Cli, words: tuple[str, ...], text: str) -> None:
    done = cli("tune", *words)
    assert done.code == 2 and text in done.err and "Traceback" not in done.err
    assert not (desk.project / "runs").exists()


def test_a_measurement_that_failed_in_part_is_shown_and_is_a_failure(desk: Desk, cli: Cli) -> None:
    give(desk, f"{{ cp {desk.project}/measured.json $SLURMDDP_RUN/tuned.json; exit 1; }}")
    done = cli("tune", "job.yaml")
    assert done.code == 1 and "note: not all was measured: " in done.out
    assert (desk.project / "gpt.tuned.yaml").exists()


def test_without_any_result_nothing_is_written(desk: Desk, cli: Cli) -> None:
    give(desk, "exit 1")
    done = cli("tune", "job.yaml")
    assert done.code == 1 and "nothing was measured" in done.err
    desk.write("measured.json", json.dumps(MEASURED._replace(points=(), notes=("nothing fits",)).write()))
    give(desk, f"cp {desk.project}/measured.json $SLURMDDP_RUN/tuned.json")
    assert "nothing was measured: nothing fits" in cli("tune", "job.yaml").err
    give(desk, "echo '{}' >$SLURMDDP_RUN/tuned.json")
    done = cli("tune", "job.yaml")
    assert done.code == 1 and "tuned.json is no result of slurmddp tune" in done.err
    assert not (desk.project / "gpt.tuned.yaml").exists()


def test_a_range_of_nodes_is_submitted_as_it_is(desk: Desk, cli: Cli) -> None:
    desk.program("sbatch", "#!/bin/bash\necho 'sbatch: error: no such account' >&2\nexit 1\n")
    for name in ("squeue", "scontrol", "sacct"):
        desk.program(name, "#!/bin/bash\n")
    desk.write("many.yaml", JOB.replace("here", "cores").replace("{ranks_per_node: 2}", "{nodes: 2-3, account: a}"))
    done = cli("tune", "many.yaml")
    assert "no such account" in done.err and "fixed" not in done.err and done.code != 0


def test_a_script_measured_here_does_not_change_the_nodes_of_its_job(
    desk: Desk, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = Tuned("", None, points=(Point(1, 1, 10.0, ""), Point(1, 2, 11.0, "")))
    monkeypatch.setattr(tune, "_script", lambda request: (desk.project, measured, ""))
    options = ("--nodes", "4", "--set", "resources.account=a")
    done = cli("tune", "train.py", "--site", "cores", *options, "-o", "there.yaml")
    assert done.code == 0, done.err
    assert "nodes and ranks stay as the job has them" in done.out and "1 rank: each one more" in done.out
    asked = desk.resolve_file(desk.project / "there.yaml").job.resources
    assert (asked.nodes, asked.ranks_per_node) == (4, None)
    cli("tune", "train.py", "--set", "resources.ranks_per_node=2", "--site", "here", "-o", "here.yaml")
    assert desk.resolve_file(desk.project / "here.yaml").job.resources.ranks_per_node == 1
