"""slurmddp checkpoint: what it prints and refuses, without torch."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slurmddp.cluster.local import job_id_of
from slurmddp.run.layout import RunFolder
from tests.checkpoints import flip, make_checkpoint, make_run
from tests.helpers import Desk, Result

Cli = Callable[..., Result]


@pytest.fixture
def run(desk: Desk) -> RunFolder:
    return make_run(desk.project / "runs" / "gpt-1", 100, 200, 300)


def shard(run: RunFolder, step: int) -> Path:
    return run.checkpoints / f"step-{step:08d}" / "__0_0.distcp"


# --- list


def test_list(cli: Cli, run: RunFolder) -> None:
    flip(run.checkpoints / "step-00000300" / "manifest.json")
    done = cli("checkpoint", "list", "runs/gpt-1")
    assert done.code == 0, done.err
    head, *rows = done.out.splitlines()
    assert head.split() == ["STEP", "SAVED", "SIZE", "FILES", "RANKS", "STATE"]
    assert [row.split()[0] for row in rows] == ["300", "200", "100"]
    assert "not usable: manifest.json" in rows[0]
    assert rows[1].endswith("complete (content not compared); --resume starts here")
    assert rows[2].endswith("complete (content not compared)")


def test_list_shows_the_runs_that_are_continued(cli: Cli, run: RunFolder) -> None:
    more = make_run(run.path.with_name("gpt-2"), job={"resume_from": [str(run.checkpoints)]})
    done = cli("checkpoint", "list", str(more.path))
    assert "RUN" in done.out.splitlines()[0]
    assert all(" gpt-1 " in row for row in done.out.splitlines()[1:])
    shown = json.loads(cli("checkpoint", "list", str(more.path), "--json").out)
    assert [(item["step"], item["own"], item["resumed_from"]) for item in shown] == [
        (300, False, True),
        (200, False, False),
        (100, False, False),
    ]
    assert set(shown[0]) == {
        "step", "path", "run_id", "own", "complete", "fault", "resumed_from", "saved", "bytes", "files", "world",
    }  # fmt: skip


def test_list_of_none(cli: Cli, desk: Desk) -> None:
    make_run(desk.project / "runs" / "new")
    done = cli("checkpoint", "list", "runs/new")
    assert (done.code, done.out) == (0, "run new has no checkpoints yet\n")
    assert cli("checkpoint", "list", "runs/new", "--json").out == "[]\n"


# --- verify


def test_verify(cli: Cli, run: RunFolder) -> None:
    done = cli("checkpoint", "verify", "runs/gpt-1")
    assert (done.code, done.out.count("good")) == (0, 3), done.err
    flip(shard(run, 200))
    done = cli("checkpoint", "verify", "runs/gpt-1")
    assert done.code == 1
    assert "step 200  NOT USABLE: __0_0.distcp has other content than was written" in done.out
    assert cli("checkpoint", "verify", "runs/gpt-1", "--step", "300").code == 0
    shown = json.loads(cli("checkpoint", "verify", "runs/gpt-1", "--step", "200", "--json").out)
    assert [(item["step"], item["complete"]) for item in shown] == [(200, False)]
    assert "__0_0.distcp" in shown[0]["fault"]


def test_a_large_one_tells_how_far_it_is(cli: Cli, run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurmddp.commands.checkpoint.SAY_EVERY", 500)
    done = cli("checkpoint", "verify", "runs/gpt-1", "--step", "300")
    assert "step 300: verifying" in done.err
    assert " of 1.9 KiB verified" in done.err


# --- prune


def test_prune(cli: Cli, run: RunFolder, desk: Desk) -> None:
    before = desk.tree()
    dry = cli("checkpoint", "prune", "runs/gpt-1", "--keep", "1", "--dry-run")
    assert (dry.code, desk.tree()) == (0, before)
    assert dry.out.splitlines()[0].startswith("would remove step-00000200, ")
    done = cli("checkpoint", "prune", "runs/gpt-1", "--keep", "1")
    assert done.code == 0, done.err
    assert done.out == dry.out.replace("would remove", "removed").replace("would be freed", "freed")
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000300"]
    again = cli("checkpoint", "prune", "runs/gpt-1", "--keep", "1")
    assert (again.code, again.out) == (0, "nothing to remove; kept 1: step 300\n")


def test_prune_for_programs(cli: Cli, run: RunFolder) -> None:
    flip(shard(run, 300))
    shown = json.loads(
        cli("checkpoint", "prune", "runs/gpt-1", "--keep", "1", "--keep-every", "100", "--dry-run", "--json").out
    )
    assert [Path(path).name for path in shown["kept"]] == ["step-00000200", "step-00000100"]
    assert [Path(path).name for path in shown["left_alone"]] == ["step-00000300"]
    assert (shown["removed"], shown["bytes"], shown["done"]) == ([], 0, False)


def test_a_run_that_goes_on_is_not_pruned(cli: Cli, run: RunFolder, desk: Desk) -> None:
    going = {"job_id": str(job_id_of(os.getpid())), "scheduler": "local", "command": [], "time": "", "host": ""}
    run.submission.write_text(json.dumps(going))
    saving = run.checkpoints / ".saving-step-00000400-attempt-000-ab"
    saving.mkdir()
    before = desk.tree()
    for more in ((), ("--dry-run",)):
        done = cli("checkpoint", "prune", "runs/gpt-1", "--keep", "1", *more)
        assert done.code == 2
        assert "gpt-1 is still running" in done.err
    assert desk.tree() == before
    assert cli("checkpoint", "prune", "runs/gpt-1", "--keep", "1", "--force").code == 0
    assert sorted(path.name for path in run.checkpoints.iterdir()) == [saving.name, "step-00000300"]


# --- a tired user


@pytest.mark.parametrize("command", ["list", "verify", "prune", "export"])
def test_what_is_no_run_with_checkpoints(cli: Cli, desk: Desk, command: str) -> None:
    more = ("--keep", "1") if command == "prune" else ()
    desk.write("train.py")
    make_run(desk.project / "runs" / "empty")
    own = make_run(desk.project / "runs" / "own")
    own.job_json.unlink()
    blocked = make_run(desk.project / "runs" / "blocked")
    blocked.checkpoints.write_text("")
    cases = {
        "./train.py": "is not a run folder",
        "runs/gone": "does not exist",
        "runs/own": "ran your own script",
        "runs/blocked": "not a folder",
        **({} if command == "list" else {"runs/empty": "no checkpoints yet"}),
    }
    before = desk.tree()
    for name, message in cases.items():
        done = cli("checkpoint", command, name, *more)
        assert (done.code, done.out) == (2, ""), (name, done)
        assert message in done.err
        assert "Traceback" not in done.err
    assert desk.tree() == before


@pytest.mark.parametrize("name", ["last", "nothing", "4711"])
def test_no_such_run(cli: Cli, name: str) -> None:
    for command in (["list"], ["verify"], ["prune", "--keep", "1"], ["export"]):
        done = cli("checkpoint", *command, name)
        assert (done.code, done.out) == (2, "")
        assert f"no run '{name}'" in done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--step", "999"), "no checkpoint of step 999\n  -> its checkpoints are of steps 300, 200, 100"),
        (("--step", "200"), "this checkpoint is not usable: __0_0.distcp has other content"),
        (("-o", "there.pt"), "there.pt exists"),
        (("-o", "runs"), "is a folder\n  -> add a file name"),
        (("-o", "no/such/folder.pt"), "does not exist"),
        (("--format", "npz"), "'npz' is not one of pt, safetensors"),
        (("--what", "optimizer"), "'optimizer' is not one of model, all"),
        (("--format", "pt", "-o", "x.safetensors"), "does not match the file name"),
    ],
)
def test_exports_that_are_refused(
    cli: Cli, run: RunFolder, desk: Desk, arguments: tuple[str, ...], message: str
) -> None:
    flip(shard(run, 200))
    desk.write("there.pt", "mine")
    before = desk.tree()
    done = cli("checkpoint", "export", "runs/gpt-1", *arguments)
    assert (done.code, done.out) == (2, ""), done
    assert message in done.err
    assert desk.tree() == before


def test_nothing_good_to_export(cli: Cli, run: RunFolder, desk: Desk) -> None:
    for step in (100, 200, 300):
        flip(shard(run, step))
    done = cli("checkpoint", "export", "runs/gpt-1")
    assert done.code == 2
    assert done.err.count(": __0_0.distcp") == 3
    assert "run gpt-1 has no good checkpoint" in done.err


def test_the_commands_need_no_torch(desk: Desk, run: RunFolder) -> None:
    forbid = "import sys; sys.modules.update(torch=None, numpy=None); from slurmddp.commands.app import main; "
    for arguments in (["list", "runs/gpt-1"], ["verify", "runs/gpt-1"], ["prune", "runs/gpt-1", "--keep", "2"]):
        code = f"{forbid}sys.argv = ['slurmddp', 'checkpoint', *{arguments}]; main()"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=desk.project, env=desk.environment, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr


# --- plan


def submitted(desk: Desk, cli: Cli, **changes: str) -> RunFolder:
    """A run folder that `slurmddp submit` made, with a checkpoint in it."""
    desk.write("books/a.txt", "text")
    sets = [word for key, value in changes.items() for word in ("--set", f"{key.replace('__', '.')}={value}")]
    desk.write("job.yaml", "name: gpt\nsite: gpus\ntrain:\n  task: lm\n  data: {path: books}\n")
    desk.program("sbatch", "#!/bin/bash\necho 4711\n")
    done = cli("submit", "job.yaml", *sets)
    assert done.code == 0, done.err
    run = RunFolder(next((desk.project / "runs").iterdir()))
    make_checkpoint(run.checkpoints, 5)
    return run


def test_plan_suggests_an_interval_once_a_run_of_this_name_has_figures(cli: Cli, desk: Desk) -> None:
    run = submitted(desk, cli, site="cores")
    assert "checkpoint interval" not in cli("check", "job.yaml").out
    events = [
        {"event": "started", "nodes": 4, "time": 0},
        {"event": "first_step", "time": 100},
        {"event": "checkpoint_saved", "time": 1000, "seconds": 20, "stall": 0.5},
        {"event": "job_ended", "time": 180100, "exit_code": 1},
    ]
    run.events.write_text("".join(json.dumps({"attempt": 0, **event}) + "\n" for event in events))
    (line,) = (line for line in cli("check", "job.yaml").out.splitlines() if line.startswith("checkpoint interval"))
    assert line == (
        "checkpoint interval 29m suggested (stall 0.5 s, 1 failure in 200 node-hours over 1 run,"
        " assuming one per 860 node-hours; now 30m)"
    )
    assert "checkpoint interval" not in cli("check", "job.yaml", "--name", "other").out
