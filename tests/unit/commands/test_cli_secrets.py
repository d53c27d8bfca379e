"""environment_from: its values reach the ranks, and nothing else that anybody could read."""

import json
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from slurmddp.alerts import secrets
from slurmddp.render.scripts import node_script
from slurmddp.run.layout import RunFolder
from tests.helpers import SIF, Desk, Result, check_bash, make_code, on_disk

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


def test_the_ranks_get_the_value_and_no_file_has_it(ready: Desk, cli: Callable[..., Result]) -> None:
    """A real run on this machine: job.sh, node.sh, and a stand-in for the ranks."""
    done = cli("run", "job.yaml", "--quiet", HF_TOKEN=TOKEN)
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
    key = run / "rendezvous.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    for path in [path for path in ready.root.rglob("*") if path.is_file() and path != key]:
        assert key.read_bytes().strip() not in path.read_bytes(), path  # also the ranks' words and environments


@pytest.mark.parametrize(("container", "prefix"), [("none", ""), ("apptainer", "APPTAINERENV_")])
def test_the_preflight_does_not_get_it(ready: Desk, tmp_path: Path, container: str, prefix: str) -> None:
    """node.sh as Slurm starts it, for both of its steps."""
    ready.write("image.sif", SIF)
    for name in ("ranks", "apptainer"):
        ready.program(name, '#!/bin/bash\ncat /proc/self/environ >"$HOME/seen"\n')
    alerts = f"alerts: [{{to: json}}]\ncontainer: {{runtime: {container}, image: image.sif}}\n"
    plan = ready.plan(JOB.replace("site: here", "site: cores") + alerts)
    folder = RunFolder(tmp_path / "run-1")
    folder.logs.mkdir(parents=True)
    make_code(folder.path)
    folder.node_sh.write_text(on_disk(ready, node_script(plan)))
    secrets.keep(folder, {}, ready.environment, {"HF_TOKEN": TOKEN})
    words = {"RUN": str(folder.path), "LOGS": str(folder.logs), "ATTEMPT": "0", "PORT": "61000", "NODES": "1"}
    slurm = {"SLURMD_NODENAME": "here", "SLURM_JOB_ID": "7", "SLURMDDP_RENDEZVOUS_ID": "id"}
    environment = {**ready.environment, **slurm, **{f"SLURMDDP_{name}": value for name, value in words.items()}}
    for step in ("preflight", ""):
        command = ["bash", str(folder.node_sh)]
        done = subprocess.run(command, env={**environment, "SLURMDDP_STEP": step}, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
        seen = (ready.home / "seen").read_bytes().split(b"\0")
        assert (f"{prefix}HF_TOKEN={TOKEN}".encode() in seen) == (step == ""), step
        assert step == "" or not any(b"hf_01" in pair for pair in seen)
    check_bash(folder.node_sh.read_text(), "node.sh", tmp_path)
    secrets.forget(folder.id, ready.environment)
    done = subprocess.run(["bash", str(folder.node_sh)], env=environment, capture_output=True, check=False)
    assert done.returncode == 1 and b"cannot read the variables of environment_from" in done.stderr


def test_a_variable_that_is_not_set_is_one_message_and_leaves_nothing(ready: Desk, cli: Callable[..., Result]) -> None:
    for given in ({}, {"HF_TOKEN": ""}):
        done = cli("run", "job.yaml", **given)
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith("slurmddp: environment_from: not set in this shell: HF_TOKEN\n  -> export HF_TOKEN=")
        assert not (ready.project / "runs").exists() and not (ready.config / "secrets").exists()
    dry = cli("submit", "job.yaml", "--dry-run")
    assert dry.code == 2 and "slurmddp: environment_from: not set in this shell: HF_TOKEN" in dry.err


def test_a_resumed_run_gets_the_value_of_the_shell_that_resumes(ready: Desk, cli: Callable[..., Result]) -> None:
    assert cli("run", "job.yaml", "--quiet", HF_TOKEN=TOKEN).code == 0
    (first,) = (ready.project / "runs").iterdir()
    (first / "checkpoints/last.ckpt").touch()  # what the script could have saved
    refused = cli("run", "--quiet", "--resume", first.name)
    assert refused.code == 2 and "not set in this shell: HF_TOKEN" in refused.err
    assert list((ready.project / "runs").iterdir()) == [first]
    done = cli("run", "--quiet", "--resume", first.name, HF_TOKEN="another")
    assert done.code == 0, done.err
    assert b"HF_TOKEN=another" in (ready.home / "ranks.environment").read_bytes().split(b"\0")


def test_a_value_that_stands_in_the_job_as_well_is_refused(ready: Desk, cli: Callable[..., Result]) -> None:
    ready.write("job.yaml", "name: gpt\nsite: here\nenvironment_from: [KEY]\ntrain: {script: train.py}\n")
    done = cli("run", "job.yaml", "--", "--login", "0123456789abcdef", KEY="0123456789abcdef")
    assert done.code == 2 and "the value of KEY" in done.err and "0123456789abcdef" not in done.err
    assert not (ready.project / "runs").exists()


def test_what_looks_like_a_secret_is_refused_by_each_command(ready: Desk, cli: Callable[..., Result]) -> None:
    for command in ("submit", "run", "check"):
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
    done = cli("check", "job.yaml", "--per-node", HF_TOKEN=TOKEN)
    assert done.code == 0 and "export HF_TOKEN=..." in done.out and "hf_012" not in done.out
