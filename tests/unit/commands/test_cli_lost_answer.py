"""A submission whose answer is lost: the job is found in the queue, and nothing runs beside it in silence."""

import json
import os
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from slurmddp.launch import submit as submissions
from slurmddp.run import submission
from slurmddp.run.gate import own
from slurmddp.run.layout import RunFolder
from tests.helpers import Desk, Result, append_event

Cli = Callable[..., Result]

JOB = "name: gpt\nsite: cores\nresources: {nodes: 1, time: 1h}\ntrain: {script: train.py}\n"
#: The controller takes the job, number 4711, and the answer is lost as $HOME/lost says.
SBATCH = """#!/bin/bash
script=${@: -2:1}; cp "$(dirname "$script")/submission.json" "$HOME/before"
[[ -e $HOME/never ]] || printf '4711 %s %s\\n' "$script" "${@: -1}" >>"$HOME/queue"
eval "$(cat "$HOME/lost")"
"""
SQUEUE = """#!/bin/bash
echo "$*" >>"$HOME/asked"
[[ ! -e $HOME/away ]] || { echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1; }
case $* in
*--format=%i*) [[ $* == *--me* ]] && cat "$HOME/queue" ;;
*) cat "$HOME/row" ;;
esac
true
"""
SILENT = {
    "rubbish": "echo 'welcome to the cluster'",
    "killed": "kill -KILL $$",
    "killed below a wrapper": "exit 137",
    "no answer": "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv' >&2; exit 1",
}


@pytest.fixture
def ready(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setattr(submissions, "LOOKS", (0.0, 0.0))
    desk.write("job.yaml", JOB)
    desk.write("train.py", "print('hello')\n")
    desk.program("sbatch", SBATCH)
    desk.program("squeue", SQUEUE)
    (desk.home / "queue").touch()
    words = ("4711", "PENDING", "0", "N/A", "N/A", "1:00:00", "Priority", "")
    row = "".join(word.ljust(width) for word, width in zip(words, (24, 20, 12, 24, 24, 20, 160, 2048), strict=True))
    (desk.home / "row").write_text(f"{row}\n")
    (desk.home / "lost").write_text(SILENT["rubbish"])
    return desk


def runs(desk: Desk) -> list[RunFolder]:
    return [RunFolder(path) for path in sorted((desk.project / "runs").iterdir())]


def away(desk: Desk, silent: bool = True) -> None:
    (desk.home / "away").touch() if silent else (desk.home / "away").unlink()


def state(cli: Cli, run: RunFolder) -> dict[str, str]:
    return dict(json.loads(cli("status", run.id, "--json").out))


@pytest.mark.parametrize("how", SILENT)
def test_the_job_is_found_at_once(ready: Desk, cli: Cli, how: str) -> None:
    (ready.home / "lost").write_text(SILENT[how])
    done = cli("submit", "job.yaml")
    assert done.code == 0 and "job     4711" in done.out.splitlines(), done.err
    assert "warning: sbatch did not answer as expected, but the queue has its job 4711" in done.err
    before = json.loads((ready.home / "before").read_text())
    (run,) = runs(ready)
    assert (before["job_id"], before["command"][-1]) == ("", str(run.path)), "it is written down before sbatch runs"
    assert state(cli, run)["job_id"] == "4711"


@pytest.mark.parametrize("look", ["runs", "status"])
def test_the_job_is_found_by_the_next_look(ready: Desk, cli: Cli, look: str) -> None:
    away(ready)
    done = cli("submit", "job.yaml")
    (run,) = runs(ready)
    assert done.code == 1 and f"`slurmddp status {run.id}` looks for the job again" in done.err
    assert state(cli, run)["state"] == "pending", "Slurm does not answer: nothing is concluded"
    away(ready, silent=False)
    told = json.loads(cli("runs", "--json").out)[0] if look == "runs" else state(cli, run)
    assert (told["state"], told["job_id"]) == ("pending", "4711")
    assert json.loads(run.submission.read_text())["job_id"] == "4711"
    assert cli("status", "4711").out.splitlines()[0].split() == ["run", run.id]


def test_a_second_submission_beside_it_is_refused_once(ready: Desk, cli: Cli) -> None:
    away(ready)
    assert cli("submit", "job.yaml").code == 1
    away(ready, silent=False)
    (run,) = runs(ready)
    before = ready.tree(times=False).keys()
    done = cli("submit", "job.yaml")
    assert done.code == 2 and f"run {run.id} of the same name is in the queue as job 4711" in done.err
    assert ready.tree(times=False).keys() == before
    (ready.home / "lost").write_text("echo 4712")
    again = cli("submit", "job.yaml")
    assert again.code == 0 and "job     4712" in again.out.splitlines(), again.err


def test_a_second_submission_while_slurm_is_silent_is_warned_of(ready: Desk, cli: Cli) -> None:
    away(ready)
    assert cli("submit", "job.yaml").code == 1
    (run,) = runs(ready)
    (ready.home / "lost").write_text("echo 4712")
    done = cli("submit", "job.yaml")
    assert done.code == 0
    assert f"warning: sbatch did not answer when run {run.id} of the same name was submitted" in done.err


def test_a_job_that_never_came_is_not_submitted(ready: Desk, cli: Cli) -> None:
    (ready.home / "never").touch()
    done = cli("submit", "job.yaml")
    (run,) = runs(ready)
    assert done.code == 1 and "no job of this run is in the queue yet" in done.err
    told = state(cli, run)
    assert told["state"] == "not submitted" and "no job of this run is in the queue" in told["detail"]
    assert "sbatch succeeded, but printed no job id" in told["detail"]
    (ready.home / "lost").write_text("echo 4712")
    assert "its job may still appear in the queue" in cli("submit", "job.yaml").err


def test_another_submission_that_still_waits_for_sbatch_is_no_reason_to_refuse(ready: Desk, cli: Cli) -> None:
    away(ready)
    assert cli("submit", "job.yaml").code == 1
    away(ready, silent=False)
    (run,) = runs(ready)
    (ready.home / "lost").write_text("echo 4712")

    def submitted(ago: timedelta) -> Result:
        sent = submission.read(run)
        assert sent is not None
        moment = (datetime.now().astimezone() - ago).isoformat(timespec="seconds")
        submission.write(own(run, to="write"), sent._replace(failed="", time=moment))
        return cli("submit", "job.yaml")

    assert submitted(timedelta(seconds=5)).code == 0
    assert submitted(timedelta(minutes=5)).code == 2, "that sbatch, or its caller, was killed"


def test_jobs_of_others_do_not_count(ready: Desk, cli: Cli) -> None:
    """Neither those of another user, nor those of another run whose path holds this one's id."""
    (ready.home / "never").touch()
    assert cli("submit", "job.yaml").code == 1
    (run,) = runs(ready)
    other = f"{run.path}-b"
    lines = (f"7 {other}/job.sh {other}", f"8 /x/job.sh {run.path}", f"9_1 {run.path}/job.sh", f"x {run.job_sh}")
    (ready.home / "queue").write_text("\n".join(lines) + "\n")
    assert state(cli, run)["job_id"] == ""
    asked = (ready.home / "asked").read_text().splitlines()
    assert asked and all("--me" in words.split() for words in asked), "the user's own jobs only"


@pytest.mark.skipif(os.getuid() != 0, reason="giving a folder away needs root")
def test_the_run_of_another_user_is_only_looked_at(ready: Desk, cli: Cli) -> None:
    away(ready)
    assert cli("submit", "job.yaml").code == 1
    away(ready, silent=False)
    (run,) = runs(ready)
    asked = (ready.home / "asked").read_text()
    os.chown(run.path, 4242, 4242)
    assert json.loads(cli("status", str(run.path), "--json").out)["job_id"] == ""
    assert (ready.home / "asked").read_text() == asked


def test_a_run_that_started_is_known_by_its_own_word(ready: Desk, cli: Cli) -> None:
    away(ready)
    assert cli("submit", "job.yaml").code == 1
    away(ready, silent=False)
    (run,) = runs(ready)
    append_event(run.events, "job_started", attempt=0, job_id="4711", node="n1", nodes="n1")
    assert state(cli, run)["job_id"] == "4711"


def test_clean_leaves_a_run_whose_job_waits(ready: Desk, cli: Cli) -> None:
    away(ready)
    assert cli("submit", "job.yaml").code == 1
    away(ready, silent=False)
    (run,) = runs(ready)
    done = cli("clean", run.id, "--yes")
    assert run.path.is_dir() and "it is still pending" in done.out + done.err


def test_a_refusal_leaves_no_run(ready: Desk, cli: Cli) -> None:
    (ready.home / "lost").write_text("echo 'sbatch: error: Batch job submission failed: Invalid account' >&2; exit 1")
    done = cli("submit", "job.yaml")
    assert done.code == 2 and not Path(ready.project / "runs").exists(), done.err
    assert cli("runs").out == "no runs\n"


def test_cancel_finds_it_too(ready: Desk, cli: Cli) -> None:
    away(ready)
    assert cli("submit", "job.yaml").code == 1
    away(ready, silent=False)
    ready.program("scancel", '#!/bin/bash\necho "$*" >>"$HOME/cancelled"\n')
    (run,) = runs(ready)
    done = cli("cancel", run.id)
    assert done.code == 0 and "4711" in (ready.home / "cancelled").read_text(), done.err
