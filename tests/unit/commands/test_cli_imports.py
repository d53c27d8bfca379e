"""Which packages a script does not import from the copy of the code: submit says it where it can be known."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import ROOT, Desk, Result

Cli = Callable[..., Result]
SITE = "name: any\ntitle: any cluster\ngpu_request: gpus-per-node\njob: {container: {runtime: none}}\n"


@pytest.fixture
def packages(desk: Desk) -> Path:
    """The packages of a virtual environment in the user's home."""
    desk.site(SITE)
    desk.program("sbatch", "#!/bin/bash\necho 4711\n")
    desk.write("proj/src/pkg/__init__.py")
    desk.write("proj/scripts/train.py", "import os\nfrom pkg.model import Model\n")
    folder = desk.home / "venv/lib/python3.12/site-packages"
    folder.mkdir(parents=True)
    return folder


def finder(desk: Desk, packages: Path) -> None:
    """As pip writes it for a package with a finder."""
    url = {"url": (desk.project / "proj").as_uri(), "dir_info": {"editable": True}}
    (packages / "pkg-1.dist-info").mkdir()
    (packages / "pkg-1.dist-info/direct_url.json").write_text(json.dumps(url))


def pth(desk: Desk, packages: Path) -> None:
    (packages / "__editable__.pkg-1.pth").write_text(f"{desk.project}/proj/src\nimport x\n")


def warned(desk: Desk, cli: Cli, *options: str, script: str = "proj/scripts/train.py") -> str:
    setup = f"setup=[source {desk.home}/venv/bin/activate]"
    done = cli("submit", script, "--site", "any", "--gpus-per-node", "1", "--set", setup, *options)
    assert done.code == 0, done.err
    return "\n".join(line for line in done.err.splitlines() if "imports" in line)


@pytest.mark.parametrize("install", [finder, pth])
def test_an_editable_install_is_said(
    desk: Desk, cli: Cli, packages: Path, install: Callable[[Desk, Path], None]
) -> None:
    install(desk, packages)
    there = desk.project / "proj"
    assert warned(desk, cli) == (
        f"warning: train.py imports pkg, an editable install: the ranks import {there}/src, where a later edit changes "
        f"a job that waits, not the copy; to run the copy of it: --set train.project={there} "
        "--set environment.PYTHONPATH={run}/code/project/src"
    )
    options = ("--set", f"train.project={there}", "--set", "environment.PYTHONPATH={run}/code/project/src")
    assert warned(desk, cli, *options) == ""
    run = max((desk.project / "runs").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert (run / "code/project/src/pkg/__init__.py").exists()
    assert f"{run}/code/project/src" in (run / "node.sh").read_text().replace('"$run"', str(run)), run
    in_container = ("--set", "container.runtime=apptainer", "--image", "image.sif")
    desk.write("image.sif", "#!/usr/bin/env run-singularity\n\0SIF_MAGIC\0and the rest")
    assert "an editable install" not in warned(desk, cli, *in_container)  # nobody knows what is in there


def test_slurmddp_itself_comes_with_the_run(desk: Desk, cli: Cli, packages: Path) -> None:
    """Also where it is an editable install, as in a checkout."""
    (packages / "__editable__.slurmddp-1.pth").write_text(f"{ROOT}\n")
    desk.write("train.py", "from slurmddp.runtime import Checkpointer\n")
    assert warned(desk, cli, script="train.py") == ""


def test_a_package_beside_the_folder_of_scripts_is_said(desk: Desk, cli: Cli, packages: Path) -> None:
    there = desk.project / "proj"
    told = (
        f"train.py imports pkg, and {there}/src is not what the ranks import: it is not copied; to run the copy of it"
    )
    assert told in warned(desk, cli)
    desk.write("flat/pkg/__init__.py")
    desk.write("flat/tools/train.py", "import pkg\n")
    flat = warned(desk, cli, script="flat/tools/train.py")
    assert flat.endswith(f"to run the copy of it: --set train.project={desk.project}/flat"), flat
    assert warned(desk, cli, "--set", f"train.project={desk.project}/flat", script="flat/tools/train.py") == ""


def test_what_the_ranks_do_import_from_the_copy_is_not_said(desk: Desk, cli: Cli, packages: Path) -> None:
    pth(desk, packages)
    desk.write("proj/scripts/pkg.py")
    assert warned(desk, cli) == ""
    desk.write("other/train.py", "import sys, json, nowhere\n")
    assert warned(desk, cli, script="other/train.py") == ""
