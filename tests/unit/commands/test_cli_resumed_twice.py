"""Two runs that continue one: the second is refused while the first is not over, whichever of them is faster."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slurmddp.run import continued
from slurmddp.run.layout import RunFolder
from tests.helpers import Desk, Result, append_event

Cli = Callable[..., Result]

JOB = "name: gpt\nsite: cores\nresources: {nodes: 1, time: 1h}\ntrain: {script: train.py}\n"
#: Job numbers count up; jobs in $HOME/over have ended.
SBATCH = """#!/bin/bash
exec 9>>"$HOME/numbers"; flock 9; echo >&9; wc -l <"$HOME/numbers"
"""
SQUEUE = """#!/bin/bash
for word; do [[ $word == --jobs=* ]] && jobs=${word#--jobs=}; done
for job in ${jobs//,/ }; do
  grep -qx "$job" "$HOME/over" || printf '%-24s%-20s%-12s%-24s%-24s%-20s%-160s\\n' $job RUNNING 0 N/A N/A 1:00:00 None
done
"""


@pytest.fixture
def ready(desk: Desk) -> Desk:
    desk.write("job.yaml", JOB)
    desk.write("train.py", "print('hello')\n")
    desk.program("sbatch", SBATCH)
    desk.program("squeue", SQUEUE)
    (desk.home / "over").write_text("1\n")
    return desk


@pytest.fixture
def first(ready: Desk, cli: Cli) -> RunFolder:
    """A run that has ended: job 1."""
    done = cli("submit", "job.yaml", "--json")
    run = RunFolder(Path(json.loads(done.out)["run_folder"]))
    (run.checkpoints / "epoch-1.pt").write_text("weights")
    append_event(run.events, "job_started", attempt=0, job_id="1", node="n1", nodes="n1")
    append_event(run.events, "job_ended", attempt=0, job_id="1", exit_code=1, signal="", decision="failed")
    return run


def folder_of(done: Result) -> RunFolder:
    assert done.code == 0, done.err
    return RunFolder(Path(json.loads(done.out)["run_folder"]))


def test_the_second_is_refused_and_names_the_first(ready: Desk, cli: Cli, first: RunFolder) -> None:
    second = folder_of(cli("submit", "--resume", first.id, "--json"))
    count = len(list(first.path.parent.iterdir()))
    done = cli("resume", first.id)
    assert done.code == 2 and len(list(first.path.parent.iterdir())) == count
    assert f"run {second.id} continues run {first.id} already: it is running, job 2" in done.err
    assert f"slurmddp status {second.id}" in done.err
    assert cli("resume", first.id, "--name", "other").code == 0, "two branches on purpose"


def test_a_run_that_is_over_does_not_block(ready: Desk, cli: Cli, first: RunFolder) -> None:
    second = folder_of(cli("submit", "--resume", first.id, "--json"))
    (ready.home / "over").write_text("1\n2\n")
    append_event(second.events, "job_started", attempt=0, job_id="2", node="n1", nodes="n1")
    third = folder_of(cli("submit", "--resume", first.id, "--json"))
    assert f"run {third.id} continues" in cli("resume", first.id).err


def test_a_folder_that_is_gone_does_not_block(ready: Desk, cli: Cli, first: RunFolder) -> None:
    second = folder_of(cli("submit", "--resume", first.id, "--json"))
    second.path.rename(second.path.with_name(".away"))
    assert cli("resume", first.id).code == 0


def test_a_submission_that_was_refused_does_not_block(ready: Desk, cli: Cli, first: RunFolder) -> None:
    ready.program("sbatch", "#!/bin/bash\necho 'sbatch: error: Invalid account' >&2; exit 1\n")
    assert cli("resume", first.id).code == 2
    ready.program("sbatch", SBATCH)
    assert cli("resume", first.id).code == 0


def test_one_that_is_just_being_submitted_blocks(
    ready: Desk, cli: Cli, first: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = folder_of(cli("submit", "--resume", first.id, "--json"))
    second.submission.unlink()
    assert "it is being submitted" in cli("resume", first.id).err
    monkeypatch.setattr(continued, "SUBMITTING", 0.0)
    assert cli("resume", first.id).code == 0


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"name": "gpt"}'])
def test_a_damaged_note_does_not_block(
    ready: Desk, cli: Cli, first: RunFolder, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    first.continued.mkdir()
    (first.continued / "0001.json").write_text(text)
    assert cli("resume", first.id).code == 0
    assert (first.continued / "0002.json").is_file()


def test_a_folder_that_cannot_be_written_is_a_warning(ready: Desk, cli: Cli, first: RunFolder) -> None:
    first.continued.write_text("a file")
    done = cli("resume", first.id)
    assert done.code == 0 and f"a second --resume of {first.id} will not be noticed" in done.err


def test_of_four_at_the_same_time_one_is_submitted(ready: Desk, first: RunFolder) -> None:
    words = [sys.executable, "-m", "slurmddp", "submit", "--resume", first.id]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    started = [
        subprocess.Popen(words, cwd=ready.project, env=ready.environment, text=True, **pipes)  # type: ignore[call-overload]
        for _ in range(4)
    ]
    errors = [process.communicate(timeout=100)[1] for process in started]
    assert sorted(process.returncode for process in started) == [0, 2, 2, 2], errors
    assert sum(f"continues run {first.id} already" in text for text in errors) == 3
    assert (ready.home / "numbers").read_text().count("\n") == 2


def test_a_run_in_the_foreground_is_refused_as_well(ready: Desk, cli: Cli, first: RunFolder) -> None:
    second = folder_of(cli("submit", "--resume", first.id, "--json"))
    ready.program("srun", "#!/bin/bash\nexit 1\n")
    before = sorted(first.path.parent.iterdir())
    done = cli("run", "--resume", first.id, SLURM_JOB_ID="9", SLURM_JOB_NUM_NODES="1", SLURM_JOB_NODELIST="n1")
    assert done.code == 2 and f"run {second.id} continues run {first.id} already" in done.err, done.err
    assert sorted(first.path.parent.iterdir()) == before
