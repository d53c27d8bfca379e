"""Without a container: the ranks run in the virtual environment that a setup line activates."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.helpers import Desk

JOB = """\
name: own
site: here
setup: [{setup}]
container: {{python: {python}}}
train: {{script: train.py}}
"""
SCRIPT = "import sys, torch\nprint('the ranks run in', sys.prefix)\n"


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    made = Desk(tmp_path)
    made.write("train.py", SCRIPT)
    return made


def environment(folder: Path, *, torch: bool) -> Path:
    """A real virtual environment; torch comes from the one that runs the tests."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    if torch:
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "torch.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return folder


def test_a_python_without_torch_fails_once_and_names_the_way_out(desk: Desk) -> None:
    python = environment(desk.root / "bare", torch=False) / "bin/python3"
    desk.write("job.yaml", JOB.format(setup="", python=python))
    done = desk.command("run", "job.yaml")
    assert done.code == 1
    assert (
        f"no torch in {python}: name its Python, --set container.python=FILE, or add `setup: [source .../activate]`"
        in done.out + done.err
    )
    (run,) = (desk.project / "runs").glob("own-*")
    assert [path.name for path in run.glob("logs/attempt-*")] == ["attempt-000"]


def test_the_ranks_run_in_the_environment_that_setup_activates(desk: Desk) -> None:
    """slurmddp's own Python, the default of the local site, is another one."""
    folder = environment(desk.root / "mine", torch=True)
    desk.write("job.yaml", JOB.format(setup=f"source {folder}/bin/activate", python="null"))
    done = desk.command("run", "job.yaml")
    assert done.code == 0, done.out + done.err
    assert f"the ranks run in {folder}" in done.out
