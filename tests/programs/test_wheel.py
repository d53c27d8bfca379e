"""The built wheel in an environment of its own: nothing of the checkout is needed."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from slurmddp import __version__
from slurmddp.job.schema import schema_text
from slurmddp.run.version import checkout_commit
from tests.helpers import ROOT

JOB = "site: local\nresources: {ranks_per_node: 2}\ntrain: {script: train.py}\n"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a new environment with the wheel; dependencies come from this one, so nothing is fetched."""
    pytest.importorskip("build", reason="the package `build` is not installed")
    pytest.importorskip("hatchling", reason="hatchling is not installed")
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("slurmddp-*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "venv"), "platbase": str(folder / "venv")}))
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(site),
        str(wheel),
    ]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "venv" / "bin"


def run(installed: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "LANG": "C.UTF-8"}
    command = [str(installed / "python"), "-m", "slurmddp", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_it_renders_from_another_folder(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "train.py").write_text("")
    done = run(installed, tmp_path, "submit", "job.yaml", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "\n=== node.sh\n#!/bin/bash\n" in done.stdout
    made = run(installed, tmp_path, "init", "new.yaml", "--site", "testcluster")
    assert made.returncode == 0, made.stderr
    folders = "('templates', 'containers', 'site_configs')"
    where = f"import slurmddp.assets as a; print(a.package_folder(), *map(a.asset_folder, {folders}))"
    shown = subprocess.run(
        [str(installed / "python"), "-c", where], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert all(path.startswith(str(installed.parent)) for path in shown.stdout.split())


def test_it_names_the_commit_that_it_was_built_from(installed: Path, tmp_path: Path) -> None:
    commit = checkout_commit(ROOT)
    name = f"{__version__}+g{commit}" if commit else __version__
    assert run(installed, tmp_path, "--version").stdout == f"{name}\n"


def test_it_has_the_sites_and_the_schemas(installed: Path, tmp_path: Path) -> None:
    listed = run(installed, tmp_path, "site").stdout
    for path in (ROOT / "site_configs").glob("*.yaml"):
        assert path.stem in listed
    assert "broken" not in listed
    for kind in ("job", "site", "recipe"):
        assert run(installed, tmp_path, "schema", kind).stdout == schema_text(kind)
        path = Path(run(installed, tmp_path, "schema", kind, "--path").stdout.strip())
        assert path.is_relative_to(installed.parent) and path.read_text() == schema_text(kind)


def test_it_runs_a_local_job_from_its_own_snapshot(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB + "container: {python: /bin/true}\n")
    (tmp_path / "train.py").write_text("")
    done = run(installed, tmp_path, "run", "job.yaml")
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    inside = zipfile.Path(folder / "code" / "slurmddp.zip", "slurmddp/")
    assert (inside / "runtime" / "train.py").is_file() and (inside / "shell" / "node.sh").is_file()
    assert not (inside / "_assets").exists()
