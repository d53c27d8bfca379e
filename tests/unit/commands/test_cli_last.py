"""`last` is the newest run of this folder; what acts on a run of another folder asks first."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import Desk, Result

Cli = Callable[..., Result]


@pytest.fixture
def two(desk: Desk) -> tuple[Path, Path]:
    """Two projects, each with a run; the second one's is newer. Their runs lie in one folder elsewhere."""
    desk.program("sbatch", "#!/bin/bash\necho 4711\n")
    desk.program("scontrol", "#!/bin/bash\necho 'JobId=4711 JobState=PENDING' \n")
    desk.program("scancel", '#!/bin/bash\necho "$@" >> "$HOME/scancelled"\n')
    found = []
    for name in ("alpha", "beta"):
        project = desk.root / name
        project.mkdir()
        (project / "train.py").touch()
        words = ("submit", "train.py", "--site", "cores", "--set", f"paths.runs={desk.root}/runs")
        done = desk.command(*words, cwd=project)
        assert done.code == 0, done
        found.append(project)
    return found[0], found[1]


def run_of(text: str) -> str:
    found = re.search(r"^run +(\S+)", text, re.MULTILINE)
    assert found, text
    return found[1]


def test_runs_are_called_after_project_and_script_and_last_is_of_the_folder(desk: Desk, two: tuple[Path, Path]) -> None:
    for project in two:
        (project / "src").mkdir()
        for folder in (project, project / "src"):
            assert run_of(desk.command("status", cwd=folder).out).startswith(f"{project.name}-train-2")
    assert run_of(desk.command("status", cwd=desk.project).out).startswith("beta-train-")


@pytest.mark.parametrize("command", ["cancel", "resume", "rerun"])
def test_a_run_of_another_folder_is_not_touched_without_a_yes(desk: Desk, two: tuple[Path, Path], command: str) -> None:
    runs = sorted(path.name for path in (desk.root / "runs").iterdir())
    done = desk.command(command, cwd=desk.project)
    assert done.code == 2, done
    assert "last: the last run was submitted from another folder: beta-train-" in done.err
    assert f"-> slurmddp {command} beta-train-" in done.err and "or add --yes" in done.err
    assert not (desk.home / "scancelled").exists()
    assert runs == sorted(path.name for path in (desk.root / "runs").iterdir())


def test_a_run_of_this_folder_is_named_and_cancelled(desk: Desk, two: tuple[Path, Path]) -> None:
    done = desk.command("cancel", "--now", cwd=two[0])
    assert done.code == 0 and run_of(done.err).startswith("alpha-train-"), done
    assert f"folder  {os.path.realpath(desk.root)}/runs/alpha-train-" in done.err
    other = desk.command("cancel", "--now", "--yes", cwd=desk.project)
    assert other.code == 0 and run_of(other.err).startswith("beta-train-"), other
    assert len((desk.home / "scancelled").read_text().splitlines()) == 2
