"""The epilogue of job.sh: one last alert if the supervisor has sent none, with Python or without, and the exit code."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from slurmddp.alerts import secrets
from slurmddp.alerts.secrets import last_alerts
from slurmddp.job.plan.model import Plan
from slurmddp.render.scripts import alert_files, job_script, payloads
from slurmddp.run.layout import RunFolder
from slurmddp.run.snapshot import copy_runtime
from tests.helpers import Desk, change_code
from tests.programs.alerts.conftest import TARGETS
from tests.receiver import Receiver

#: Instead of the supervisor: leaves what it would leave on the node's disk, and exits.
SUPERVISE = "import os, sys\nrun, folder = sys.argv[2:4]\n"


@dataclass
class Run:
    """A run with alert targets, whose job.sh is started."""

    desk: Desk
    plan: Plan
    folder: RunFolder

    @property
    def python(self) -> Path:
        return self.folder.python_sh

    @property
    def where(self) -> Path:
        """A file that says which folder job.sh has made on the node's disk."""
        return self.desk.root / "where"

    def supervisor(self, text: str) -> None:
        """What does the supervisor's part; `alert` is as it was."""
        begin = f"import sys\nif sys.argv[1] == 'job':\n    open({str(self.where)!r}, 'w').write(sys.argv[3])\n"
        begin += f"    exec({SUPERVISE + text!r})\n"
        change_code(self.folder.path, "supervisor/__main__.py", lambda text: begin + text)

    def go(self) -> subprocess.CompletedProcess[str]:
        words = ["bash", str(self.folder.job_sh), str(self.folder.path)]
        slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1", "SLURMD_NODENAME": "node1"}
        environment = {**self.desk.environment, **slurm}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=90)
        assert not (self.where.exists() and os.path.exists(self.where.read_text())), (
            "its folder on the node's disk is gone"
        )
        return done


@pytest.fixture
def receiver() -> object:
    with Receiver() as found:
        yield found


@pytest.fixture
def run(desk: Desk, receiver: Receiver) -> Run:
    desk.write("train.py", "print('hello')\n")
    targets = ", ".join(f"{{to: {to}, insecure: true}}" for to in TARGETS)
    plan = desk.plan(
        f"name: gpt\nsite: gpus\ntrain: {{script: train.py}}\nresources: {{time: 1h}}\nalerts: [{targets}]\n"
    )
    folder = RunFolder(desk.root / "gpt-20260101-120000-abcd")
    folder.logs.mkdir(parents=True)
    copy_runtime(folder.code)
    for name, text in {"job.sh": job_script(plan), **alert_files(plan)}.items():
        (folder.path / name).parent.mkdir(exist_ok=True)
        (folder.path / name).write_text(text)
    assert plan.alerts
    last = last_alerts(plan.alerts, payloads(plan), folder.id, str(folder.path))
    secrets.keep(folder, dict.fromkeys(TARGETS, receiver.url), desk.environment, None, last)
    return Run(desk, plan, folder)


def kinds(receiver: Receiver) -> list[str]:
    return sorted(request.headers["idempotency-key"].rpartition(".")[2] for request in receiver.received)


def test_without_python_curl_sends_what_submit_has_prepared(run: Run, receiver: Receiver) -> None:
    run.python.write_text("exit 96\n")
    done = run.go()
    assert done.returncode == 1 and "no Python 3.6 or newer on" in done.stderr
    assert kinds(receiver) == ["failed"] * len(TARGETS)
    (message,) = [found.json() for found in receiver.received if b'"schema"' in found.body.encode()]
    assert (message["kind"], message["run"], message["folder"]) == ("failed", run.folder.id, str(run.folder.path))
    assert abs(message["time"] - run.folder.job_sh.stat().st_mtime) < 120 and "job.log" in message["cause"]
    assert (message["job_id"], message["step"], message["log"]) == (None, None, None)


@pytest.mark.parametrize("gone", ["code", "."])
def test_a_purged_run_folder_is_told_of(run: Run, receiver: Receiver, gone: str) -> None:
    """What is needed for it lies beside the addresses."""
    text = run.folder.job_sh.read_text()
    shutil.rmtree(run.folder.path / gone)
    if gone == ".":
        run.folder.path.parent.mkdir(exist_ok=True)
        spool = run.desk.root / "slurm_script"
        spool.write_text(text)
        words = ["bash", str(spool), str(run.folder.path)]
        done = subprocess.run(words, env=run.desk.environment, capture_output=True, text=True, check=False, timeout=90)
    else:
        done = run.go()
    assert done.returncode == 1 and "the run's copy of the code is gone" in done.stderr
    assert kinds(receiver) == ["failed"] * len(TARGETS)


def test_with_python_the_supervisors_own_sender_says_why(run: Run, receiver: Receiver) -> None:
    run.supervisor("sys.exit(98)")
    done = run.go()
    assert done.returncode == 1
    assert kinds(receiver) == ["failed"] * len(TARGETS)
    (message,) = [found.json() for found in receiver.received if b'"schema"' in found.body.encode()]
    assert message["cause"] == "the run folder does not answer, or cannot be written" and message["job_id"] == "7"


@pytest.mark.parametrize("code", [0, 3])
def test_what_the_supervisor_has_told_is_told_once(run: Run, receiver: Receiver, code: int) -> None:
    run.supervisor(f"open(folder + '/told', 'w'); open(folder + '/finished', 'w').write('{code}\\n'); sys.exit({code})")
    assert run.go().returncode == code and receiver.received == []


def test_one_that_is_killed_after_its_last_alert_is_told_of_once(run: Run, receiver: Receiver) -> None:
    run.supervisor("open(folder + '/told', 'w'); sys.exit(97)")
    assert run.go().returncode == 1 and receiver.received == []


@pytest.mark.parametrize("guarded", [True, False], ids=["with a guard", "before there is a guard"])
def test_one_that_is_killed_leaves_it_to_the_guard(run: Run, receiver: Receiver, guarded: bool) -> None:
    """The guard leaves word in the folder of job.sh, which is the second argument."""
    there = "open(sys.argv[3] + '/guard', 'w').close(); " if guarded else ""
    run.supervisor(f"{there}os.kill(os.getpid(), {int(signal.SIGKILL)})")
    words = ["bash", str(run.folder.job_sh), str(run.folder.path)]
    done = subprocess.run(words, env=run.desk.environment, capture_output=True, check=False, timeout=90)
    assert done.returncode == (-signal.SIGKILL if guarded else 1)
    assert len(receiver.received) == (0 if guarded else len(TARGETS))


def test_the_prepared_texts_hold_no_address_and_no_other_user_reads_them(run: Run, receiver: Receiver) -> None:
    folder = secrets.of_run(run.folder.id, run.desk.environment)
    files = sorted(folder.glob(".last.*"))
    assert [path.name for path in files] == sorted(f".last.{name}" for name in TARGETS)
    for path in files:
        assert receiver.url not in path.read_text() and path.stat().st_mode & 0o777 == 0o600
    assert os.stat(folder).st_mode & 0o777 == 0o700


@pytest.mark.parametrize("code", [0, 3])
def test_a_full_disk_of_the_node_does_not_change_the_end(run: Run, receiver: Receiver, code: int) -> None:
    """What the supervisor leaves there cannot be written then: its exit code says how the job ended."""
    run.supervisor(f"sys.exit({code})")
    done = run.go()
    assert done.returncode == (1 if code else 0) and len(receiver.received) == (len(TARGETS) if code else 0)
    assert code == 0 or "the supervisor was killed (exit code 3)" in done.stderr


def test_where_tmp_is_full_the_memory_of_the_node_is_used(run: Run, receiver: Receiver) -> None:
    script = '#!/bin/bash\n[[ "$*" != *"-p /tmp"* ]] || { echo full >&2; exit 1; }\nexec /usr/bin/mktemp "$@"\n'
    run.desk.program("mktemp", script)
    run.supervisor("open(folder + '/told', 'w'); open(folder + '/finished', 'w').write('0'); sys.exit(0)")
    assert run.go().returncode == 0 and receiver.received == []
    assert run.where.read_text().startswith("/dev/shm/")


def test_without_any_disk_the_job_fails_and_tells(run: Run, receiver: Receiver) -> None:
    run.desk.program("mktemp", "#!/bin/bash\nexit 1\n")
    done = run.go()
    assert done.returncode == 1 and "cannot create a folder on the disk of" in done.stderr
    assert kinds(receiver) == ["failed"] * len(TARGETS)


def test_a_server_that_does_not_answer_does_not_hold_the_epilogue(run: Run) -> None:
    """Slurm kills job.sh some seconds after its SIGTERM: each message has a deadline."""
    run.python.write_text("exit 96\n")
    limits = run.desk.root / "limits"
    run.desk.program("curl", f'#!/bin/bash\ncat >/dev/null\necho "$@" >>{limits}\nexit 28\n')
    assert run.go().returncode == 1
    words = [line.split() for line in limits.read_text().splitlines()]
    assert len(words) == len(TARGETS) and {line[line.index("--max-time") + 1] for line in words} == {"20"}
