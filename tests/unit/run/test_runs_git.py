"""git in a folder whose .git/config somebody else wrote: none of its programs runs."""

import os
import subprocess
from pathlib import Path

import pytest

from slurmddp.launch.image import commit_of
from slurmddp.run import git
from slurmddp.run.manifest import git_facts


def ask(folder: Path, *words: str, **more: str) -> str:
    who = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
    done = subprocess.run(
        ["git", "-c", "protocol.file.allow=always", *words],
        cwd=folder, env={**os.environ, **who, **more}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.strip()


def repository(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True)
    ask(folder, "init", "-q")
    for name, text in files.items():
        (folder / name).write_text(text)
    ask(folder, "add", ".")
    ask(folder, "commit", "-qm", "first")
    return folder


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """As after a copy: no file has the time that git knows, so `git status` reads it, through its filter."""
    folder = repository(tmp_path / "project", train="1\n", other="2\n")
    os.utime(folder / "train", (1, 1))
    return folder


def asked_in(folder: Path) -> None:
    git.listed(folder, timeout=20)
    git_facts(folder)
    commit_of(folder)


@pytest.mark.parametrize(
    ("key", "attribute"),
    [
        ("filter.x.clean", "train filter=x"), ("filter.x.smudge", "train filter=x"),
        ("filter.x.process", "train filter=x"), ("filter.a.b.clean", "train filter=a.b"), ("core.fsmonitor", None),
        ("diff.x.textconv", "train diff=x"), ("diff.external", None), ("diff.x.command", "train diff=x"),
        ("core.pager", None), ("pager.status", None), ("core.sshCommand", None), ("core.editor", None),
        ("core.alternateRefsCommand", None), ("alias.status", None), ("merge.x.driver", "train merge=x"),
    ],
)  # fmt: skip
def test_no_program_of_a_copied_configuration_runs(project: Path, key: str, attribute: str | None) -> None:
    marker = project.parent / "pwned"
    (project / ".git/info/attributes").write_text(f"{attribute or ''}\n")
    (project / ".gitattributes").write_text(f"{attribute or ''}\n")
    command = f"!touch {marker}" if key.startswith("alias") else f"touch {marker}; cat; false"
    ask(project, "config", key, command)
    if key.startswith("filter"):
        ask(project, "config", key.rpartition(".")[0] + ".required", "true")
    asked_in(project)
    assert not marker.exists()


def test_such_a_filter_would_run_without_us(project: Path) -> None:
    marker = project.parent / "pwned"
    (project / ".git/info/attributes").write_text("train filter=x\n")
    ask(project, "config", "filter.x.clean", f"touch {marker}; cat")
    ask(project, "status")
    assert marker.exists()


def test_filters_of_a_submodule_and_of_an_included_file_do_not_run_either(project: Path, tmp_path: Path) -> None:
    marker = tmp_path / "pwned"
    ask(project, "submodule", "--quiet", "add", str(repository(tmp_path / "part", inner="1\n")), "part")
    ask(project, "commit", "-qam", "part")
    state = git.state(project)
    assert state is not None and not state.dirty

    own = project / ".git/modules/part"
    (own / "info/attributes").write_text("* filter=x\n")
    ask(project / "part", "config", "filter.x.clean", f"touch {marker}; cat")
    os.utime(project / "part/inner", (1, 1))
    (tmp_path / "more").write_text(f'[filter "y"]\n\tclean = touch {marker}; cat\n\trequired = true\n')
    (project / ".git/info/attributes").write_text("train filter=y\n")
    ask(project, "config", "include.path", str(tmp_path / "more"))
    asked_in(project)
    state = git.state(project)
    assert state is not None and not state.dirty and not marker.exists()
    (project / "part/inner").write_text("3\n")
    state = git.state(project)
    assert state is not None and state.dirty and not marker.exists()
    assert (commit_of(project) or "").endswith("-dirty")


def test_a_file_behind_a_filter_counts_as_changed_once_git_has_to_read_it(tmp_path: Path) -> None:
    """As one of git-lfs: what git has is not what lies in the folder."""
    project = tmp_path / "project"
    project.mkdir()
    ask(project, "init", "-q")
    ask(project, "config", "filter.x.clean", "tr 1 2")
    (project / ".gitattributes").write_text("train filter=x\n")
    (project / "train").write_text("1\n")
    os.utime(project / "train", (1, 1))
    ask(project, "add", ".")
    ask(project, "commit", "-qm", "first")
    state = git.state(project)
    assert state is not None and not state.dirty
    os.utime(project / "train", (2, 2))
    assert ask(project, "-c", "core.untrackedCache=false", "diff", "--name-only") == ""  # with its filter
    os.utime(project / "train", (3, 3))
    state = git.state(project)
    assert state is not None and state.dirty


def test_hooks_and_filters_of_a_strange_name_do_not_run(project: Path) -> None:
    marker = project.parent / "pwned"
    hooks = project / ".git/hooks"
    for name in ("post-index-change", "fsmonitor-watchman", "reference-transaction", "post-checkout"):
        (hooks / name).write_text(f"#!/bin/sh\ntouch {marker}\n")
        (hooks / name).chmod(0o755)
    asked_in(project)
    assert not marker.exists()
    with (project / ".git/config").open("a") as file:
        file.write(f'[filter "a=b"]\n\tclean = touch {marker}; cat\n')
    (project / ".git/info/attributes").write_text("train filter=a=b\n")
    facts = git_facts(project)
    assert facts is not None and "unusual name" in facts["note"] and commit_of(project) is None
    assert not marker.exists()


def test_nothing_is_fetched_for_a_clone_that_lacks_objects(project: Path) -> None:
    marker = project.parent / "pwned"
    blob = ask(project, "rev-parse", "HEAD:train")
    ask(project, "mv", "train", "renamed")
    (project / "renamed").write_text("1\nmore\n")
    ask(project, "add", ".")
    (project / ".git/objects" / blob[:2] / blob[2:]).unlink()
    for key, value in {
        "extensions.partialClone": "origin", "remote.origin.promisor": "true", "protocol.ext.allow": "always",
        "remote.origin.url": f"ext::sh -c touch% {marker}", "core.repositoryFormatVersion": "1",
    }.items():  # fmt: skip
        ask(project, "config", key, value)
    asked_in(project)
    facts = git_facts(project)
    assert facts is not None and facts["dirty"] in (True, None) and not marker.exists()
    subprocess.run(["git", "status", "--porcelain"], cwd=project, capture_output=True, check=False)
    assert marker.exists()  # so this is a case in which git would have fetched
