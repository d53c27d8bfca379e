"""`slurmddp --host`: from one home to another through a real sshd of this test's own, on a loopback port."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import Desk, Result
from tests.programs.test_docs_commands import FORGOTTEN, NOTHING, SBATCH

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
MISSING = [name for name, path in (("sshd", SSHD), ("rsync", shutil.which("rsync"))) if path is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {' '.join(MISSING)} (make system)")

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
    """A user on a laptop, her home on a login node, and the sshd between them."""

    def __init__(self, laptop: Desk, folder: Path, sockets: Path) -> None:
        self.laptop, self.there, self.folder = laptop, Desk(folder / "there"), folder
        for name in ("host_key", "key"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(command, check=True)
        self.log = folder / "sshd.log"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        (folder / "sshd_config").write_text(
            f"Port {self.port}\nListenAddress 127.0.0.1\nHostKey {folder}/host_key\nPidFile none\nStrictModes no\n"
            f"AuthorizedKeysFile {folder}/key.pub\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
            f"PermitRootLogin yes\nUsePAM no\nSetEnv HOME={self.there.home}\n"
        )
        key = (folder / "host_key.pub").read_text()
        (folder / "known_hosts").write_text(f"[127.0.0.1]:{self.port} {key}")
        (folder / "ssh_config").write_text(
            f"Host login\n  HostName 127.0.0.1\n  Port {self.port}\n  User {getpass.getuser()}\n"
            f"  IdentityFile {folder}/key\n  IdentitiesOnly yes\n  UserKnownHostsFile {folder}/known_hosts\n"
        )
        # ssh finds ~/.ssh by the user's entry in the system, not by HOME.
        laptop.program("ssh", f'#!/bin/bash\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n')
        laptop.environment["XDG_RUNTIME_DIR"] = str(sockets)
        path = f"export PATH={self.there.bin}:/usr/bin:/bin PYTHONPATH={self.there.environment['PYTHONPATH']}"
        (self.there.home / ".bash_profile").write_text(f"echo Welcome to the cluster\n{path} WORK=~/work\n")
        self.program(f'exec {sys.executable} -m slurmddp "$@"')
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where sshd, as root, wants to be rooted
        self.sshd = subprocess.Popen([str(SSHD), "-D", "-f", str(folder / "sshd_config"), "-E", str(self.log)])
        wait_for(lambda: self.log.is_file() and "listening" in self.log.read_text())

    def program(self, text: str) -> None:
        """Make `slurmddp` on the login node a bash script."""
        self.there.program("slurmddp", f"#!/bin/bash\n{text}\n")

    def run(self, *words: str, **variables: str) -> Result:
        """Run `slurmddp --host login WORDS` on the laptop."""
        return self.laptop.command("--host", "login", *words, **variables)

    def cut(self) -> None:
        """Kill what sshd started for each connection."""
        for child in Path(f"/proc/{self.sshd.pid}/task/{self.sshd.pid}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)

    def close(self) -> None:
        """End the connections, then sshd."""
        if self.sshd.poll() is None:
            self.cut()
        self.sshd.terminate()
        self.sshd.wait(timeout=30)


def wait_for(condition: object) -> None:
    until = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.fixture
def login(desk: Desk, tmp_path: Path) -> Iterator[Login]:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="s") as sockets:
        found = Login(desk, tmp_path, Path(sockets))
        try:
            yield found
        finally:
            found.close()


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
    assert slurm.log.read_text().count("Accepted publickey") == 1, "one login for all commands"


def test_words_arrive_as_they_are_and_exit_codes_come_back(login: Login) -> None:
    login.program('if [[ $1 == --version ]]; then echo 9; exit; fi; printf "%s\\0" "$@"; exit "${@: -1}"')
    done = login.run("logs", *HOSTILE, "3")
    assert (done.code, done.out.split("\0")[:-1]) == (3, ["logs", *HOSTILE, "3"])
    assert "warning: login has version 9, this machine" in done.err
    assert not list(login.folder.rglob("x")) and not Path("x").exists()
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
            login.cut()
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
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "slurmddp", "--host", "login", "status"]
    with subprocess.Popen(
        command, cwd=login.laptop.project, env=login.laptop.environment, stdin=theirs, stdout=theirs, stderr=theirs
    ) as child:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # Linux's end of file: nobody else has the terminal
            while data := os.read(ours, 65536):
                shown += data
        os.close(ours)
    assert child.returncode == 0 and b"terminal\r\n" in shown and b"closed" not in shown, shown


def test_what_is_missing_there_is_named(login: Login) -> None:
    login.laptop.write("train.py")
    assert login.run("plan", "train.py", "--site", "cores", SLURMDDP_HOST="nobody@nowhere").code == 0
    unset = login.laptop.command("--host", "login", "--remote-dir", "$SCRATCH/x", "plan", "train.py")
    assert unset.code == 2 and "$SCRATCH is not set on login" in unset.err
    (login.laptop.config / "config.yaml").write_text("remote_dir: $WORK/copies\n")
    assert f"to login:{login.there.home}/work/copies/project-" in login.run("plan", "train.py", "--site", "cores").err
    (login.there.bin / "slurmddp").unlink()
    for words in (("status",), ("submit", "train.py")):
        done = login.run(*words)
        assert done.code == 2 and "slurmddp is not installed on login" in done.err, done.err
        assert "ssh login 'python3 -m venv ~/venvs/slurmddp && ~/venvs/slurmddp/bin/pip install" in done.err
    login.close()
    closed = login.run("status")
    assert closed.code == 255 and "cannot connect to login" in closed.err
