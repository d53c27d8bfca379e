"""The version that scripts and manifests name: the package's, and the commit that it was installed from."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurmddp import __version__
from slurmddp.run import version as module
from tests.helpers import Desk, Result


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with one commit; its package lies in `slurmddp`."""
    folder = tmp_path / "checkout"
    (folder / "slurmddp").mkdir(parents=True)
    (folder / "README.md").write_text("one\n")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    return folder


def git(folder: Path, *words: str) -> str:
    who = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
    done = subprocess.run(
        ["git", *words], cwd=folder, env={**os.environ, **who}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The version is asked for anew, from a package in another place."""
    module.version.cache_clear()
    monkeypatch.setattr(module, "package_folder", lambda: Path("/nowhere/slurmddp"))
    yield monkeypatch
    module.version.cache_clear()


def test_in_a_checkout_it_has_the_commit(checkout: Path, installed: pytest.MonkeyPatch) -> None:
    installed.setattr(module, "package_folder", lambda: checkout / "slurmddp")
    assert module.version() == f"{__version__}+g{git(checkout, 'rev-parse', 'HEAD')[:10]}"


def test_an_edited_checkout_is_dirty_and_a_tag_changes_nothing(checkout: Path) -> None:
    git(checkout, "tag", "-am", "a tag", "v9")
    clean = git(checkout, "rev-parse", "HEAD")[:10]
    assert module.checkout_commit(checkout) == clean
    (checkout / "untracked").write_text("")
    assert module.checkout_commit(checkout) == clean
    (checkout / "README.md").write_text("two\n")
    assert module.checkout_commit(checkout) == f"{clean}.dirty"


def test_an_environment_inside_a_users_repository_does_not_name_the_users_commit(
    checkout: Path, installed: pytest.MonkeyPatch
) -> None:
    package = checkout / ".venv/lib/slurmddp"
    package.mkdir(parents=True)
    installed.setattr(module, "package_folder", lambda: package)
    assert module.version() == __version__


def test_a_wheel_names_the_commit_that_it_was_built_from(tmp_path: Path, installed: pytest.MonkeyPatch) -> None:
    (tmp_path / "_assets").mkdir()
    (tmp_path / "_assets/commit").write_text("0123456789\n")
    installed.setattr(module, "package_folder", lambda: tmp_path)
    assert module.version() == f"{__version__}+g0123456789"


def test_without_git_it_is_the_version_alone(checkout: Path, installed: pytest.MonkeyPatch) -> None:
    installed.setattr(module, "package_folder", lambda: checkout / "slurmddp")
    installed.setenv("PATH", "/nowhere")
    assert module.version() == __version__


def test_command_script_and_manifest_name_it(
    desk: Desk, cli: Callable[..., Result], checkout: Path, installed: pytest.MonkeyPatch
) -> None:
    installed.setattr(module, "package_folder", lambda: checkout / "slurmddp")
    name = f"{__version__}+g{git(checkout, 'rev-parse', 'HEAD')[:10]}"
    assert cli("--version").out == f"{name}\n"
    desk.write("train.py", "")
    desk.write("job.yaml", "site: here\ntrain: {script: train.py}\ncontainer: {python: /bin/true}\n")
    shown = cli("submit", "job.yaml", "--dry-run").out
    (made,) = (line for line in shown.splitlines() if line.endswith(f"Made by slurmddp {name}."))
    ran = cli("run", "job.yaml")
    assert ran.code == 0, ran.err
    (run,) = (desk.project / "runs").iterdir()
    assert made in (run / "job.sh").read_text()
    assert json.loads((run / "manifest.json").read_text())["slurmddp"] == name
