"""`slurmddp --host`: from one home to another through a real sshd of this test's own, on a loopback port."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import Desk, Result
from tests.programs.test_docs_commands import FORGOTTEN, NOTHING, SBATCH
from tests.sshd import Sshd, needs_sshd, started, wait_for

pytestmark = needs_sshd

#: Stands for torchrun and its ranks: prints until the file `enough` lies beside the job, at most for a minute.
RANKS = """#!/bin/bash
[[ $1 != -c ]] || exit 0
for ((line = 0; line < 600; line++)); do
  echo "line $line"
  [[ ! -e "$HOME/enough" ]] || exit 0
  sleep 0.1
done
"""

HOSTILE = [
    "a b",
    "$(touch x)",
    "`touch x`",
    "'",
    '"',
    ";exit 9",
    "\\",
    "a\nb",
    "*",
    "--host",
    "-x",
    "",
    "ü€",
    "!!",
    "~",
]


class Login:
    """A user's home on a login node, and the sshd between it and her laptop."""

    def __init__(self, sshd: Sshd, there: Desk) -> None:
        self.sshd, self.there, self.laptop = sshd, there, sshd.laptop
        path = f"export PATH={there.bin}:/usr/bin:/bin PYTHONPATH={there.environment['PYTHONPATH']}"
        (there.home / ".bash_profile").write_text(f"echo Welcome to the cluster\n{path} WORK=~/work\n")
        self.program(f'exec {sys.executable} -m slurmddp "$@"')

    def program(self, text: str) -> None:
        """Make `slurmddp` on the login node a bash script."""
        self.there.program("slurmddp", f"#!/bin/bash\n{text}\n")

    def run(self, *words: str, **variables: str) -> Result:
        """Run `slurmddp --host login WORDS` on the laptop."""
        return self.sshd.run(*words, **variables)

    @contextlib.contextmanager
    def on_terminal(self, *words: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
        """Start `slurmddp --host login WORDS` on a terminal; its process, and what reads the terminal."""
        ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "slurmddp", "--host", "login", *words]
        with subprocess.Popen(
            command, cwd=self.laptop.project, env=self.laptop.environment, stdin=theirs, stdout=theirs, stderr=theirs
        ) as child:
            os.close(theirs)
            yield child, ours
        os.close(ours)


def shown(terminal: int) -> bytes:
    """What the terminal shows until nobody else has it."""
    text = b""
    with contextlib.suppress(OSError):  # Linux's end of file
        while data := os.read(terminal, 65536):
            text += data
    return text


@pytest.fixture
def login(desk: Desk, tmp_path: Path) -> Iterator[Login]:
    there = Desk(tmp_path / "there")
    with started(desk, tmp_path, f"SetEnv HOME={there.home}") as sshd:
        yield Login(sshd, there)


@pytest.fixture
def slurm(login: Login) -> Login:
    """A login node whose sbatch takes a job that is done at once."""
    login.there.program("sbatch", SBATCH)
    for name, text in (("squeue", FORGOTTEN), ("scontrol", FORGOTTEN), ("scancel", FORGOTTEN), ("sacct", NOTHING)):
        login.there.program(name, text)
    return login


def test_a_project_goes_across_and_its_report_comes_back(slurm: Login) -> None:
    laptop = slurm.laptop
    laptop.write("train.py", "print('hi')\n")
    laptop.write("pkg/old.py")
    laptop.write(".env", "TOKEN=1\n")
    submit = ("submit", "train.py", "--site", "cores", "--nodes", "1", "--time", "1h")
    done = slurm.run(*submit, "--json")
    assert done.code == 0, done.err
    run = Path(json.loads(done.out)["run_folder"])
    assert "credentials" in done.err and ".env" in done.err and "Welcome" in done.err
    copy = run.parent.parent
    assert f") to login:{copy}\n" in done.err and copy.parent == slurm.there.home / "slurmddp", done.err
    assert (copy / "train.py").read_text() == "print('hi')\n" and not (copy / ".env").exists()
    assert (run / "code" / "project" / "pkg" / "old.py").exists()

    (laptop.project / "pkg" / "old.py").unlink()
    assert slurm.run(*submit).code == 0
    assert not (copy / "pkg" / "old.py").exists() and run.is_dir(), "runs stay"
    assert slurm.run("status", run.name).out.startswith(f"run      {run.name}")

    report = slurm.run("report", run.name)
    assert (report.code, report.out) == (0, f"{run.name}.html\n"), report.err
    assert (laptop.project / f"{run.name}.html").read_text().startswith("<!doctype html>")
    again = slurm.run("report", run.name)
    assert again.code == 2 and "exists" in again.err
    assert slurm.run("report", run.name, "-o", "page.html", "--force").out == "page.html\n"
    assert slurm.run("report", run.name, "-o", "pkg").out == f"pkg/{run.name}.html\n"
    assert not list(slurm.there.root.rglob("*.html")), "nothing of it stays there"
    assert slurm.sshd.log.read_text().count("Accepted publickey") == 1, "one login for all commands"


def test_words_arrive_as_they_are_and_exit_codes_come_back(login: Login) -> None:
    login.program('if [[ $1 == --version ]]; then echo 9; exit; fi; printf "%s\\0" "$@"; exit "${@: -1}"')
    done = login.run("logs", *HOSTILE, "3")
    assert (done.code, done.out.split("\0")[:-1]) == (3, ["logs", *HOSTILE, "3"])
    assert "warning: login has version 9, this machine" in done.err
    assert not list(login.there.root.parent.rglob("x")) and not Path("x").exists()
    assert login.run("status", "255").code == 1, "255 is left to ssh"
    login.program("kill -9 $$")
    assert login.run("status").code == 137


def test_a_lost_connection_is_told_and_loses_nothing(login: Login) -> None:
    there = login.there
    there.program("ranks", RANKS)
    there.write("train.py")
    options = ["--site", "here", "--quiet", "--set", f"container.python={there.bin}/ranks"]
    command = [sys.executable, "-m", "slurmddp", "run", "train.py", *options]
    with subprocess.Popen(command, cwd=there.project, env=there.environment) as run:
        wait_for(lambda: list(there.project.glob("runs/*/logs/attempt-000/*.log")))
        follow = [sys.executable, "-m", "slurmddp", "--host", "login", "logs", "last", "-f"]
        with subprocess.Popen(
            follow, cwd=login.laptop.project, env=login.laptop.environment, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) as logs:  # fmt: skip
            assert logs.stdout is not None
            while "line 3" not in logs.stdout.readline():
                pass
            login.sshd.cut()
            _, err = logs.communicate(timeout=60)
        assert logs.returncode == 255
        assert "the connection to login was lost" in err and "slurmddp --host login logs last -f" in err
        assert login.run("status").code == 3, "a new connection, and the run goes on"
        (there.home / "enough").write_text("")
        assert run.wait(timeout=60) == 0
    assert login.run("status").code == 0


def test_a_terminal_reaches_across(login: Login) -> None:
    login.program("[[ $1 == --version ]] || { [[ -t 0 && -t 1 ]] && echo terminal || echo none; }")
    assert login.run("status").out == "none\n"
    with login.on_terminal("status") as (child, terminal):
        text = shown(terminal)
    assert child.returncode == 0 and b"terminal\r\n" in text and b"closed" not in text, text


def test_no_color_reaches_the_login_node(login: Login) -> None:
    login.program('echo "[$NO_COLOR]"')
    for value in ("1", ""):
        login.laptop.environment["NO_COLOR"] = value
        with login.on_terminal("status") as (_, terminal):
            assert f"[{value}]".encode() in shown(terminal)


def test_a_submission_is_finished_without_its_connection(slurm: Login) -> None:
    there, laptop = slurm.there, slurm.laptop
    there.program("taken", SBATCH)
    there.program(
        "sbatch",
        f'#!/bin/bash\n[[ "$*" == *--test-only* ]] || {{ touch ~/asked; sleep 5; }}\nexec {there.bin}/taken "$@"\n',
    )
    laptop.write("train.py")
    with slurm.on_terminal("submit", "train.py", "--site", "cores", "--nodes", "1", "--time", "1h") as (
        child,
        terminal,
    ):
        wait_for((there.home / "asked").exists)
        slurm.sshd.cut()
        text = shown(terminal)
    assert child.returncode == 255 and b"Look again: slurmddp --host login runs" in text, text
    wait_for(lambda: list(there.home.glob("slurmddp/*/runs/*/submission.json")))  # before sbatch has answered
    wait_for(lambda: slurm.run("status").code == 0)


def test_a_slow_copy_shows_how_long_it_takes(login: Login) -> None:
    login.laptop.write("train.py")
    rsync = '#!/bin/bash\nuntil [[ -e $HOME/seen ]]; do sleep 0.1; done\nexec /usr/bin/rsync "$@"\n'
    login.laptop.program("rsync", rsync)
    login.laptop.environment["TERM"] = "xterm"
    with login.on_terminal("check", "train.py", "--site", "cores") as (child, terminal):
        text = b""
        while b"\rcopying 1 file (" not in text:
            text += os.read(terminal, 4096)
        (login.laptop.home / "seen").touch()
        text += shown(terminal)
        assert child.wait(timeout=60) == 0 and b"copying" not in text.rpartition(b"\r\x1b[K")[2], text


def test_what_is_missing_there_is_named(login: Login) -> None:
    login.laptop.write("train.py")
    assert login.run("check", "train.py", "--site", "cores", SLURMDDP_HOST="nobody@nowhere").code == 0
    unset = login.laptop.command("--host", "login", "--remote-dir", "$SCRATCH/x", "check", "train.py")
    assert unset.code == 2 and "$SCRATCH is not set on login" in unset.err
    (login.laptop.config / "config.yaml").write_text("remote_dir: $WORK/copies\n")
    assert f"to login:{login.there.home}/work/copies/project-" in login.run("check", "train.py", "--site", "cores").err
    (login.there.bin / "slurmddp").unlink()
    for words in (("status",), ("submit", "train.py")):
        done = login.run(*words)
        assert done.code == 2 and "slurmddp is not installed on login" in done.err, done.err
        assert "ssh login 'python3 -m venv ~/venvs/slurmddp && ~/venvs/slurmddp/bin/pip install" in done.err
    login.sshd.close()
    closed = login.run("status")
    assert closed.code == 255 and "cannot connect to login" in closed.err
