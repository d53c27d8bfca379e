"""--venv, --conda and the active environment: what the ranks run in where no image is named."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import Desk, Result

Cli = Callable[..., Result]


@pytest.fixture
def project(desk: Desk) -> Path:
    """A script, and a site whose ranks would run in an image."""
    profile = desk.config / "sites" / "cores.yaml"
    profile.write_text(profile.read_text().replace("runtime: none", "runtime: apptainer"))
    desk.write("train.py")
    return desk.project


def environment(desk: Desk, name: str, *, torch: bool) -> Path:
    """A folder that looks like a virtual or conda environment; its Python says whether it has torch."""
    folder = desk.root / name
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "activate").touch()
    python = folder / "bin" / "python"
    python.write_text(f"#!/bin/sh\nexit {0 if torch else 1}\n")
    python.chmod(0o755)
    return folder


def conda(desk: Desk) -> Path:
    base = desk.root / "miniforge"
    (base / "etc/profile.d").mkdir(parents=True)
    (base / "etc/profile.d/conda.sh").touch()
    return base


def submitted(cli: Cli, *words: str, **variables: str) -> Result:
    return cli("submit", "train.py", "--site", "cores", "--nodes", "2", "--dry-run", *words, **variables)


def test_venv_and_conda_are_activated_on_each_node(project: Path, desk: Desk, cli: Cli) -> None:
    folder, base = environment(desk, "my venv", torch=True), conda(desk)
    done = submitted(cli, "--venv", str(folder))
    assert done.code == 0 and f"  'source '\"'\"'{folder}/bin/activate'\"'\"''" in done.out, done.out + done.err
    done = submitted(cli, "--conda", "gpt", CONDA_EXE=str(base / "bin/conda"))
    assert f"  'source {base}/etc/profile.d/conda.sh'\n  'conda activate gpt'\n" in done.out, done.out + done.err
    assert "activate" not in cli("check", "train.py", "--site", "cores", "--explain", "container.runtime").out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--venv", "nothing"), "nothing is no virtual environment: it has no bin/activate"),
        (("--conda", "gpt"), "conda is not on this machine"),
        (("--venv", "a", "--image", "b.sif"), "--image and --venv cannot be combined"),
        (("--venv", "a", "--conda", "b"), "--venv and --conda cannot be combined"),
    ],
)
def test_what_is_none_is_refused(project: Path, cli: Cli, words: tuple[str, ...], message: str) -> None:
    done = submitted(cli, *words)
    assert (done.code, done.out) == (2, "") and message in done.err and "->" in done.err


def test_the_active_one_is_taken_where_no_image_is_named(project: Path, desk: Desk, cli: Cli) -> None:
    folder = environment(desk, "venv", torch=True)
    done = submitted(cli, VIRTUAL_ENV=str(folder))
    assert done.code == 0 and f"'source {folder}/bin/activate'" in done.out, done.err
    assert f"no image is named: the ranks use the virtual environment {folder} (VIRTUAL_ENV)" in done.err
    told = cli("check", "train.py", "--site", "cores", "--explain", "setup", VIRTUAL_ENV=str(folder))
    assert f"setup.0 = source {folder}/bin/activate\n  active environment: VIRTUAL_ENV" in told.out, told.out
    base = conda(desk)
    active = {"CONDA_PREFIX": str(folder), "CONDA_EXE": str(base / "bin/conda")}
    assert f"'conda activate {folder}'" in submitted(cli, **active).out
    image = submitted(cli, "--image", "x.sif", VIRTUAL_ENV=str(folder))
    assert "activate" not in image.out and "the ranks use" not in image.err


def test_one_without_torch_is_not_taken(project: Path, desk: Desk, cli: Cli) -> None:
    folder = environment(desk, "tools", torch=False)
    done = submitted(cli, VIRTUAL_ENV=str(folder))
    assert done.code == 2 and "container.image is not set" in done.err and "--venv DIR, or --conda NAME" in done.err
