"""Every command that README and docs show is run here, in the order of its page, in one shell with a home of its own.

Slurm is a stand-in: a job that it takes is done at once and leaves what a finished run leaves. Ranks are a stand-in,
too, so that no PyTorch is needed. All else is real: the command, its files, job.sh on this machine, an HTTP receiver.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import ROOT, SIF, Desk
from tests.receiver import Receiver

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

#: What the first word of a block is where the block is for a shell; the site highlights these.
PROGRAMS = frozenset((ROOT / "docs/site/programs.txt").read_text(encoding="utf-8").split())

#: Commands that cannot run here, each with the reason. First match counts; each must match something.
ELSEWHERE = {
    r"git clone|(uv|pip|pipx|conda|mamba) |python3? -m (venv|pip)|source .*/bin/activate":
        "installs from a package index; tests/programs/test_wheel.py installs the wheel",
    r"make |python3? -m (benchmarks|tests)|.*python3? -m pytest": "takes minutes to an hour; CI runs `make test`",
    r"salloc |slurmddp run job.yaml --nodes 1 &":
        "needs an allocation: tests/cluster/test_runs.py::test_runs_side_by_side_in_one_allocation",
    r"apptainer |slurmddp build-image (?!.*--dry-run)": "needs Apptainer and a registry: tests/cluster/test_images.py",
    r"slurmddp checkpoint export": "needs a checkpoint: tests/runtime/test_export.py",
    r"slurmddp report .*--compare ": "names a run of the page: tests/unit/report/test_report_page.py",
    r"(WANDB_MODE=offline )?slurmddp sync |wandb sync |tensorboard ":
        "needs a tracker's library: tests/runtime/test_trackers.py",
    r"rsync ": "needs a second host",
    r"slurmddp --host |export SLURMDDP_HOST": "needs a login node: tests/programs/test_remote.py",
    r"slurmddp debug (shell|port|stacks) ": "needs a running job: tests/cluster/test_observe.py",
    r"slurmddp debug profile ": "needs a running job: tests/cluster/test_training.py",
    r"slurmddp tune ": "needs PyTorch: tests/runtime/test_tune.py, tests/cluster/test_tune.py",
    r"slurmddp check .*--rehearse": "needs a real Slurm: tests/cluster/test_rehearse.py",
    r"slurmddp check .*--preflight": "needs a real Slurm: tests/cluster/test_network.py",
    r"slurmddp submit train.py --(venv|conda) ": "needs an environment: tests/unit/commands/test_cli_environments.py",
    r"slurmddp check train.py --site testcluster": "needs the test cluster's image: tests/cluster/test_srun.py",
    r"slurmddp run examples/": "needs PyTorch: tests/runtime/test_examples.py",
    r"SLURMDDP_UPDATE_GOLDEN=1 ": "takes minutes to an hour; CI runs `make test`",
    r"slurmddp site init": "needs a real Slurm: tests/cluster/test_site_init.py",
    r"ss ": "prints this machine's ports",
    r".* /home/bob/": "needs a run of another user; tests/security.md names the tests",
}  # fmt: skip

#: Commands that run until Ctrl-C, which comes after some seconds.
ENDLESS = ("slurmddp alert watch",)

#: Stands for sbatch: RUN, its last argument, is done at once. Slurm itself prints --test-only's answer to stderr, too.
SBATCH = f"""#!{sys.executable}
import json, sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from tests.checkpoints import make_checkpoint

if "--test-only" in sys.argv:
    sys.exit("sbatch: Job 4711 to start at 2026-01-01T00:00:00 using 4 processors on nodes node1 in partition main")
run, now = Path(sys.argv[-1]), time.time()
events = [
    {{"event": "job_started", "job_id": "4711", "attempt": 0, "nodes": "node1"}},
    {{"event": "attempt_started", "attempt": 0, "nodes": 1}},
    {{"event": "started", "attempt": 0, "step": 0, "nodes": 1}},
    {{"event": "first_step", "attempt": 0, "step": 1}},
    {{"event": "evaluated", "attempt": 0, "step": 20, "loss": 2.5}},
    {{"event": "finished", "attempt": 0, "step": 20}},
    {{"event": "attempt_ended", "attempt": 0, "exit_code": 0, "decision": "done"}},
    {{"event": "job_ended", "attempt": 0, "exit_code": 0, "decision": "done"}},
]
with (run / "events.jsonl").open("a") as file:
    file.writelines(json.dumps({{"time": now + step, **event}}) + "\\n" for step, event in enumerate(events))
(run / "markers").mkdir(exist_ok=True)
(run / "markers/attempt-000.json").write_text(json.dumps({{"state": "done", "step": 20, "steps": 20}}))
(run / "logs/job.log").write_text("done\\n")
for step in (10, 20):
    make_checkpoint(run / "checkpoints", step)
print(4711)
"""

#: Stand for squeue and scontrol of a cluster that has forgotten the job; sacct finds nothing.
FORGOTTEN = "#!/bin/bash\necho 'slurm_load_jobs error: Invalid job id specified' >&2\nexit 1\n"
NOTHING = "#!/bin/bash\n"


def blocks(page: Path) -> list[list[str]]:
    """The indented and fenced blocks of a page, each as its lines."""
    found: list[list[str]] = []
    fenced, before = False, ""
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            fenced = not fenced
            if fenced:
                found.append([])
        elif fenced:
            found[-1].append(line)
        elif line.startswith("    ") and not before.strip():
            found.append([line[4:]])
        elif line.startswith("    ") and before.startswith("    "):
            found[-1].append(line[4:])
        before = line
    return [block for block in found if block]


def commands(page: Path) -> list[str]:
    """The commands of a page's shell blocks without the comments above them: a trailing backslash joins two lines."""
    found = []
    for block in blocks(page):
        lines = [line for line in block if not line.startswith("#")]
        if lines and lines[0].split(" ")[0] in PROGRAMS:
            found += "\n".join(lines).replace("\\\n", " ").splitlines()
    return [command.strip() for command in found if command]


def split(command: str) -> list[str]:
    """The words of a command; a comment behind it begins with the word #."""
    return shlex.split(command.replace("$(", "").replace("<", ""))


def elsewhere(command: str) -> str | None:
    """Why a command cannot run here, or None."""
    return next((reason for pattern, reason in ELSEWHERE.items() if re.match(pattern, command)), None)


WITH_COMMANDS = [page for page in PAGES if any(elsewhere(command) is None for command in commands(page))]
NOT_HERE = [(page, command) for page in PAGES for command in commands(page) if elsewhere(command)]


@pytest.fixture
def place(desk: Desk) -> Iterator[Desk]:
    """A user's place with all that the pages take for granted."""
    desk.program("sbatch", SBATCH)
    # The stand-in for the ranks' Python is no Python: `import` would tell it from the script's.
    no_python = "[[ $1 != import ]] || unset SLURMDDP_CONTAINER__PYTHON"
    desk.program("slurmddp", f'#!/bin/bash\n{no_python}\nexec {sys.executable} -m slurmddp "$@"\n')
    for name, text in (("squeue", FORGOTTEN), ("scontrol", FORGOTTEN), ("scancel", FORGOTTEN), ("sacct", NOTHING)):
        desk.program(name, text)
    ranks = desk.program("ranks", "#!/bin/bash\necho step 1\n")
    for name in ("image.sif", "images/pytorch.sif"):
        desk.write(name, SIF)
    desk.write("Dockerfile", "FROM ubuntu:24.04\nARG VERSION\n")
    for name in ("slurm-1234.out", "node1.log"):
        desk.write(name, "step 1\n")
    desk.write("default_config.yaml", "distributed_type: MULTI_GPU\n")
    desk.write("train.sbatch", "#!/bin/bash\n#SBATCH --time=1:00:00\npython train.py\n")
    (desk.root / "work/books").mkdir(parents=True)
    for name in ("train.py", "requirements.txt", "src/a.py"):
        desk.write(name, "")
    yaml = {block[0].split(":")[0]: "\n".join(block) + "\n" for page in PAGES for block in blocks(page)}
    desk.write("mine.yaml", yaml["title"])
    with Receiver() as receiver:
        config = "alerts: [{to: slack, on: [failed, recovered, finished]}]\n"
        (desk.config / "config.yaml").write_text(config)
        folders = {"WORK": str(desk.root / "work"), "SCRATCH": str(desk.root / "scratch")}
        desk.environment |= folders | {
            "USER": "alice",
            "SLURMDDP_CONTAINER__PYTHON": str(ranks),
            "ADDRESS": receiver.url,
        }
        address = desk.config / "alerts" / "slack"
        address.parent.mkdir(parents=True)
        address.write_text(receiver.url + "\n")
        address.chmod(0o600)
        yield desk


def run_all(place: Desk, lines: list[str]) -> list[tuple[str, int, str]]:
    """Run the lines in one shell, as a user types them: each with its exit code and what it printed."""
    out = place.root / "shown"
    out.mkdir()
    script = []
    for number, line in enumerate(lines):
        if line in ENDLESS:
            line = f"timeout --signal=INT 4 {line}"
        stdin = "<<< $ADDRESS" if "/dev/stdin" in line else "</dev/null"
        script += [f"{{ {line}\n}} >{out}/{number} 2>&1 {stdin}", f"echo $? >{out}/{number}.code"]
    shell = subprocess.Popen(
        ["bash", "-c", "\n".join(script)], cwd=place.project, env=place.environment, start_new_session=True
    )
    try:
        shell.wait(timeout=200)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
    codes = [int((out / f"{number}.code").read_text()) for number in range(len(lines))]
    return [(line, codes[number], (out / f"{number}").read_text()) for number, line in enumerate(lines)]


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.name)
def test_the_commands_of_a_page_work_in_its_order(place: Desk, page: Path) -> None:
    lines = [line for line in commands(page) if elsewhere(line) is None]
    if page.name != "start.md":  # which begins at the beginning; the others take a job and a run for granted
        place.environment["SLURMDDP_RESOURCES__ACCOUNT"] = "my_project"
        lines = ["slurmddp init job.yaml --site leonardo", "slurmddp submit job.yaml", *lines]
    failed = [
        f"$ {line}\nexit code {code}\n{shown}"
        for line, code, shown in run_all(place, lines)
        if code != (124 if line in ENDLESS else 0)  # timeout(1) says that it ended the command
    ]
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize(("page", "command"), NOT_HERE, ids=lambda part: getattr(part, "name", part))
def test_commands_that_cannot_run_foreground(page: Path, command: str) -> None:
    pytest.skip(f"{page.name}: {command}: {elsewhere(command)}")


def test_no_comment_stands_beside_a_command() -> None:
    """It would be cut off on a screen, and copied with the command."""
    beside = [f"{page.name}: {command}" for page in PAGES for command in commands(page) if "#" in split(command)]
    assert not beside


def test_no_command_is_missed() -> None:
    shown = [line for page in PAGES for block in blocks(page) for line in block]
    run = {line for page in PAGES for line in commands(page)}
    commands_shown = [line for line in shown if re.match(r"\s*(\$ )?(slurmddp|pip|make) ", line)]
    assert not [line for line in commands_shown if not any(line.strip().startswith(command) for command in run)]
    assert len(run) > 40


@pytest.mark.parametrize("pattern", ELSEWHERE)
def test_each_reason_is_that_of_a_command(pattern: str) -> None:
    assert any(re.match(pattern, command) for _, command in NOT_HERE)


def test_the_runner_tells_what_fails(place: Desk) -> None:
    shown = run_all(
        place, ["export A=1 # a comment", "slurmddp status nothing", "test $A = 1", "cd ..", "test -d project"]
    )
    assert [code for _, code, _ in shown] == [0, 2, 0, 0, 0]
    assert "no run 'nothing'" in shown[1][2]


def test_job_files_of_the_pages_are_planned(place: Desk) -> None:
    """Each whole job file: a block that has both `name` and `train`."""
    jobs = [
        ("\n".join(block), page)
        for page in PAGES
        for block in blocks(page)
        if {"name:", "train:"} <= {line.split()[0] for line in block if line.split()}
    ]
    assert len(jobs) >= 2
    for text, page in jobs:
        place.write("job.yaml", text)
        done = place.command("check", "job.yaml", WORK="/work")
        assert done.code != 2 and "submit-refuses" in done.out, (page, text, done.err)  # the image is not here
