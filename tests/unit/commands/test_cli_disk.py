"""slurmddp clean and clean: what they measure, ask and remove, and what they leave alone."""

import json
import os
import pty
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slurmddp.cluster.local import job_id_of
from slurmddp.records.submission import Submission
from slurmddp.run import submission
from slurmddp.run.gate import own
from slurmddp.run.layout import RunFolder
from slurmddp.shared import beneath
from tests.checkpoints import flip, make_run
from tests.helpers import Desk, Result, append_event

Cli = Callable[..., Result]
DAY = 86400.0


def made(
    desk: Desk, name: str, *steps: int, ended: bool = True, code: int = 1, days: float = 0, after: tuple[Path, ...] = ()
) -> RunFolder:
    """A run of a job that Slurm has forgotten. days: since it wrote anything."""
    run = make_run(desk.project / "runs" / name, *steps)
    facts = json.loads(run.manifest.read_text())
    run.manifest.write_text(json.dumps({**facts, "resumed_from": [str(path) for path in after]}))
    run.logs.mkdir()
    run.job_log.write_text("text\n" * 100)
    submission.write(
        own(run, to="write"), Submission("4711", "slurm", ("sbatch",), "2026-01-01T00:00:00+00:00", "login")
    )
    append_event(run.events, "job_started", attempt=0, job_id="4711", node="n1", nodes="n1")
    if ended:
        append_event(run.events, "job_ended", attempt=0, exit_code=code, signal="", decision="failed")
    for path in run.path.iterdir():
        os.utime(path, (time.time() - days * DAY,) * 2)
    os.utime(run.job_log, (time.time() - days * DAY,) * 2)
    return run


@pytest.fixture(autouse=True)
def slurm(desk: Desk) -> None:
    """Slurm answers, and knows no job."""
    for name in ("squeue", "sacct"):
        desk.program(name, "#!/bin/bash\ntrue\n")


def size_of(path: Path) -> int:
    return sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())


def test_clean_alone_lists_the_biggest_first_and_follows_no_link(cli: Cli, desk: Desk) -> None:
    small, big = made(desk, "small"), made(desk, "big", 100, 200)
    (small.path / "data").symlink_to(desk.write("data/huge", "x" * 100_000).parent)
    (small.path / "image.sif").symlink_to(desk.project / "data" / "huge")
    found = json.loads(cli("clean", "--json").out)
    assert [item["run_id"] for item in found] == ["big", "small"]
    assert [item["bytes"] for item in found] == [size_of(big.path), size_of(small.path)]
    assert found[0]["checkpoints"] == size_of(big.checkpoints) and found[1]["checkpoints"] == 0
    assert found[0]["logs"] == 500 and found[1]["bytes"] < 10_000
    assert set(found[0]) == {"run_id", "run_folder", "bytes", "files", "checkpoints", "logs", "changed"}
    head, *rows = cli("clean").out.splitlines()
    assert head.split() == ["RUN", "SIZE", "CHECKPOINTS", "LOGS", "FILES", "AGE"]
    assert [row.split()[0] for row in rows] == ["big", "small", "2"]


def test_clean_wants_to_know_which_runs(cli: Cli, desk: Desk) -> None:
    made(desk, "gpt-1")
    for words in (("--yes",), ("--keep", "1")):
        done = cli("clean", *words)
        assert (done.code, done.out) == (2, "") and "name runs to clean" in done.err
    assert cli("clean", "--state", "finished").code == 2
    done = cli("clean", "--older-than", "long")
    assert done.code == 2 and "--older-than 'long'" in done.err
    assert cli("clean", "gpt-7", "--yes").code == 2


def test_clean_shows_what_and_how_much_and_removes_nothing_without_an_answer(cli: Cli, desk: Desk) -> None:
    run = made(desk, "gpt-1", 100, days=9)
    done = cli("clean", "--state", "failed")
    assert done.code == 2 and "cannot ask you without a terminal" in done.err and "--yes" in done.err
    first, total = done.out.splitlines()
    assert first.startswith(f"remove  {run.path} (failed, 9d old, ") and total.startswith("1 run, ")
    assert run.exists
    told = json.loads(cli("clean", "--state", "failed", "--json").out)
    assert told["done"] is False and told["bytes"] == size_of(run.path) and run.exists


@pytest.mark.parametrize(("answer", "removed"), [(b"n\n", False), (b"\n", False), (b"y\n", True)])
def test_clean_asks_on_a_terminal(desk: Desk, answer: bytes, removed: bool) -> None:
    run = made(desk, "gpt-1")
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "r+b", buffering=0) as terminal:
        terminal.write(answer)
        done = subprocess.run(
            [sys.executable, "-m", "slurmddp", "clean", str(run.path)], stdin=theirs, capture_output=True, text=True,
            cwd=desk.project, env=desk.environment, timeout=60, check=False,
        )  # fmt: skip
        os.close(theirs)
    assert "Remove all of this? [y/N]" in done.stderr
    assert run.path.exists() is not removed and done.returncode == (0 if removed else 1)


def test_clean_by_age_and_state(cli: Cli, desk: Desk) -> None:
    old, new, good = made(desk, "old", days=40), made(desk, "new", days=3), made(desk, "good", days=40, code=0)
    done = cli("clean", "--older-than", "30d", "--state", "failed", "--yes", "--json")
    assert done.code == 0, done.err
    assert [item["run_id"] for item in json.loads(done.out)["removed"]] == ["old"]
    assert not old.path.exists() and new.exists and good.exists
    done = cli("clean", "--older-than", "30d", "--yes")
    assert done.code == 0 and done.out.splitlines()[-1].startswith("removed: 1 run,") and not good.path.exists()
    assert cli("clean", "--older-than", "30d", "--yes").out == "nothing to remove\n"


def test_clean_removes_the_secrets_of_the_run(cli: Cli, desk: Desk) -> None:
    made(desk, "gpt-1")
    secret = desk.config / "secrets" / "gpt-1" / "SLACK"
    secret.parent.mkdir(parents=True)
    secret.write_text("https://example.org/hook")
    assert cli("clean", "gpt-1", "--yes").code == 0
    assert not secret.parent.exists()


def test_an_active_run_stays(cli: Cli, desk: Desk) -> None:
    run = made(desk, "gpt-1", ended=False, days=40)
    job = job_id_of(os.getpid())
    submission.write(
        own(run, to="write"), Submission(str(job), "local", ("bash",), "2026-01-01T00:00:00+00:00", "login")
    )
    done = cli("clean", "gpt-1", "--yes")
    assert done.code == 2 and "run gpt-1 must stay: it is still running" in done.err
    assert cli("clean", "--older-than", "1m", "--yes").out == "nothing to remove\n"
    assert "it is still running" in cli("clean", "--state", "running", "--yes").out
    assert run.exists


def test_a_run_of_which_slurm_says_nothing_stays(cli: Cli, desk: Desk) -> None:
    """Slurm does not answer; or it knows no such job, which may be one of another cluster."""
    run = made(desk, "gpt-1", ended=False, days=0.5)
    assert "it is lost, and wrote files in the last 24 hours" in cli("clean", "gpt-1", "--yes").err
    desk.program("squeue", "#!/bin/bash\necho slurm_load_jobs error: Unable to contact slurm controller >&2\nexit 1\n")
    old = made(desk, "gpt-2", ended=False, days=40)
    assert "it is still running" in cli("clean", "gpt-2", "--yes").err
    desk.program("squeue", "#!/bin/bash\ntrue\n")
    assert cli("clean", "--older-than", "30d", "--yes").out == "nothing to remove\n"
    assert cli("clean", "gpt-2", "--yes").code == 0
    assert run.exists and not old.path.exists()


def test_a_run_stays_while_a_newer_one_resumes_from_it(cli: Cli, desk: Desk) -> None:
    first = made(desk, "gpt-1", 100, days=50)
    second = made(desk, "gpt-2", 200, days=45, after=(first.path,))
    third = made(desk, "gpt-3", days=2, after=(second.path, first.path))
    for run in (first, second):
        done = cli("clean", run.id, "--yes")
        assert done.code == 2 and "resumes from it" in done.err and run.exists
    done = cli("clean", "--older-than", "30d", "--yes")
    assert done.code == 0 and "nothing to remove" in done.out and "stays   gpt-1: the newer run gpt-" in done.out
    assert "resumes from it" in cli("clean", "gpt-1", "--keep", "1", "--yes").err
    assert cli("clean", "--state", "failed", "--yes").code == 0, "all of them go, the newest first"
    assert not any(run.path.exists() for run in (first, second, third))


def test_links_are_removed_and_not_followed(cli: Cli, desk: Desk) -> None:
    run, data = made(desk, "gpt-1"), desk.write("data/precious", "x").parent
    (run.path / "data").symlink_to(data)
    (run.logs / "up").symlink_to(desk.project)
    assert cli("clean", "gpt-1", "--yes").code == 0
    assert not run.path.exists() and (data / "precious").exists()


def test_a_run_behind_a_link_stays(cli: Cli, desk: Desk) -> None:
    run = made(desk, "gpt-1")
    elsewhere = desk.project / "elsewhere"
    run.path.rename(elsewhere)
    run.path.symlink_to(elsewhere)
    assert "its folder is a link" in cli("clean", str(run.path), "--yes").err and elsewhere.exists()
    other = made(desk, "gpt-2", 100, 200)
    other.checkpoints.rename(desk.project / "big")
    other.checkpoints.symlink_to(desk.project / "big")
    for words in ((), ("--keep", "1")):
        assert "behind a link" in cli("clean", "gpt-2", *words, "--yes").err
    assert len(list((desk.project / "big").iterdir())) == 2


@pytest.mark.skipif(os.getuid() != 0, reason="giving a folder to another user takes root")
def test_another_users_run_stays(cli: Cli, desk: Desk) -> None:
    run = made(desk, "gpt-1")
    os.chown(run.path, 65534, -1)
    done = cli("clean", str(run.path), "--yes")
    assert done.code == 2 and "it belongs to" in done.err and run.exists
    done = cli("clean", "--state", "failed", "--yes")
    assert run.exists and "gpt-1" not in done.out  # nobody else's run is in the index


def test_old_checkpoints_only(cli: Cli, desk: Desk) -> None:
    run, empty = made(desk, "gpt-1", 100, 200, 300), made(desk, "gpt-2")
    flip(run.checkpoints / "step-00000300" / "__0_0.distcp")
    freed = size_of(run.checkpoints / "step-00000100") + size_of(run.checkpoints / "step-00000300")
    done = cli("clean", "--state", "failed", "--keep", "1")
    assert done.code == 2 and "stays   gpt-2: run gpt-2 has no checkpoints yet" in done.out
    assert f"remove  {run.checkpoints}/step-00000100 (failed, " in done.out
    done = cli("clean", "--state", "failed", "--keep", "1", "--yes", "--json")
    told = json.loads(done.out)
    removed = [Path(path).name for path in told["removed"][0]["checkpoints"]]
    # A damaged one goes where a good one is newer, which is not so here.
    assert removed == ["step-00000100"] and told["bytes"] == freed - size_of(run.checkpoints / "step-00000300")
    assert {path.name for path in run.checkpoints.iterdir()} == {"step-00000200", "step-00000300"}
    assert empty.exists


def test_a_run_that_cannot_be_removed_is_told_and_found_again(
    cli: Cli, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, other = made(desk, "gpt-1"), made(desk, "gpt-2")
    real = beneath.clear

    def clear(folder: int, keep: str = "") -> None:
        if os.readlink(f"/proc/self/fd/{folder}").startswith(str(run.path)):
            raise PermissionError(13, "Permission denied", str(run.path))
        real(folder, keep)

    with monkeypatch.context() as patch:
        patch.setattr(beneath, "clear", clear)
        done = cli("clean", "--state", "failed", "--yes")
    assert done.code == 1 and "error: run gpt-1 stays: " in done.err and "removed: 1 run," in done.out
    assert run.exists and not other.path.exists()
    run.submission.unlink(missing_ok=True)
    run.events.unlink(missing_ok=True)
    os.utime(run.manifest, (time.time() - 2 * DAY,) * 2)
    os.utime(run.job_log, (time.time() - 2 * DAY,) * 2)
    assert cli("clean", "gpt-1", "--yes").code == 0
    assert not run.path.exists()


def test_a_run_that_changed_since_it_was_listed_stays(cli: Cli, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    from slurmddp.commands import clean

    run = made(desk, "gpt-1", 100)
    real = clean._plan

    def plan(*words: object) -> object:
        planned = real(*words)  # type: ignore[arg-type]
        made(desk, "gpt-2", days=0, after=(run.path,), ended=False)
        return planned

    monkeypatch.setattr(clean, "_plan", plan)
    done = cli("clean", "--state", "failed", "--yes")
    assert "warning: run gpt-1 has changed: it stays" in done.err and run.exists
