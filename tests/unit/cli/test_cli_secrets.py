"""environment_from: its values reach the ranks, and nothing else that anybody could read."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable

import pytest

from slurmddp.alerts import secrets
from tests.helpers import Desk, Result

TOKEN = "hf_0123456789'\"$(id)\\\nsecond line"
JOB = "name: gpt\nsite: here\nenvironment_from: [HF_TOKEN]\ntrain: {script: train.py}\n"
#: Stands for the ranks' Python: writes down what it got.
RANKS = """#!/bin/bash
cp /proc/self/environ "$HOME/ranks.environment"
cat "/proc/$PPID/environ" >"$HOME/job.environment"
printf '%s\\n' "$@" >"$HOME/ranks.words"
"""


@pytest.fixture
def ready(desk: Desk) -> Desk:
    desk.write("train.py")
    desk.write("job.yaml", JOB)
    ranks = desk.program("ranks", RANKS)
    (desk.config / "config.yaml").write_text(f"container: {{python: {ranks}}}\n")
    return desk


def test_the_ranks_get_the_value_and_no_file_has_it(ready: Desk) -> None:
    """A real run on this machine: job.sh, node.sh, and a stand-in for the ranks."""
    done = ready.command("run", "job.yaml", "--quiet", HF_TOKEN=TOKEN)
    assert done.code == 0, done.err
    (run,) = (ready.project / "runs").iterdir()
    own = (ready.home / "ranks.environment").read_bytes().split(b"\0")
    assert f"HF_TOKEN={TOKEN}".encode() in own
    assert b"HF_TOKEN=" not in (ready.home / "job.environment").read_bytes(), "job.sh has no need of it"
    kept = secrets.of_run(run.name, ready.environment) / ".environment"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert kept.read_bytes() == f"HF_TOKEN={TOKEN}\0".encode()
    (ready.home / "ranks.environment").unlink()
    for path in [path for path in ready.root.rglob("*") if path.is_file() and path != kept]:
        assert b"hf_0123456789" not in path.read_bytes(), path
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    assert "hf_0123456789" not in done.out + done.err


def test_the_preflight_does_not_get_it(ready: Desk) -> None:
    from slurmddp.render.scripts import node_script

    text = node_script(ready.plan(JOB.replace("site: here", "site: cores")))
    (at,) = [index for index, line in enumerate(text.splitlines()) if "/.environment" in line and "secrets=" in line]
    assert text.splitlines()[at - 1] == 'if [[ "${SLURMDDP_STEP:-}" != preflight ]]; then'


def test_a_variable_that_is_not_set_is_one_message_and_leaves_nothing(ready: Desk, cli: Callable[..., Result]) -> None:
    for given in ({}, {"HF_TOKEN": ""}):
        done = cli("run", "job.yaml", **given)
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith("slurmddp: environment_from: not set in this shell: HF_TOKEN\n  -> export HF_TOKEN=")
        assert not (ready.project / "runs").exists() and not (ready.config / "secrets").exists()
    dry = cli("submit", "job.yaml", "--dry-run")
    assert dry.code == 0 and "warning: environment_from: not set in this shell: HF_TOKEN" in dry.err


def test_a_value_that_stands_in_the_job_as_well_is_refused(ready: Desk, cli: Callable[..., Result]) -> None:
    ready.write("job.yaml", "name: gpt\nsite: here\nenvironment_from: [KEY]\ntrain: {script: train.py}\n")
    done = cli("run", "job.yaml", "--", "--login", "0123456789abcdef", KEY="0123456789abcdef")
    assert done.code == 2 and "the value of KEY" in done.err and "0123456789abcdef" not in done.err
    assert not (ready.project / "runs").exists()


def test_what_looks_like_a_secret_is_refused_by_each_command(ready: Desk, cli: Callable[..., Result]) -> None:
    for command in ("submit", "run", "plan", "render"):
        done = cli(command, "train.py", "--site", "here", "--", "--hf-token", "0123456789abcdef")
        assert done.code == 2 and "--hf-token looks like a secret" in done.err, command
        assert "0123456789abcdef" not in done.err


def test_the_recorded_command_line_is_redacted(ready: Desk, cli: Callable[..., Result]) -> None:
    (ready.config / "config.yaml").open("a").write("not_secret: [--hf-token]\n")
    done = cli("run", "train.py", "--site", "here", "--quiet", "--", "--hf-token", "0123456789abcdef")
    assert done.code == 0, done.err
    (run,) = (ready.project / "runs").iterdir()
    assert json.loads((run / "manifest.json").read_text())["command"][-2:] == ["--hf-token", "[redacted]"]
    assert (ready.home / "ranks.words").read_text().endswith("--hf-token\n0123456789abcdef\n")


def test_commands_for_each_node_name_the_variable_and_no_value(ready: Desk, cli: Callable[..., Result]) -> None:
    done = cli("plan", "job.yaml", "--per-node", HF_TOKEN=TOKEN)
    assert done.code == 0 and "export HF_TOKEN=..." in done.out and "hf_012" not in done.out
