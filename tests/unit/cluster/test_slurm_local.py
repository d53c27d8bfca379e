"""The local site: real processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurmddp.cluster.base import JobId, Scheduler
from slurmddp.cluster.client import Slurm
from slurmddp.cluster.local import Local
from slurmddp.errors import UserError


def wait_for(condition: Callable[[], object], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


@pytest.fixture
def local() -> Iterator[Local]:
    site = Local()
    yield site
    for child in site._children:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def start(local: Local, folder: Path, script: str) -> JobId:
    path = folder / "job.sh"
    path.write_text(script)
    command = local.command(["--nodes=1"], str(path), [str(folder)], log="unused")
    assert command == ("bash", str(path), str(folder))
    return local.submit(command, folder, log=folder / "job.log")


def test_both_are_schedulers() -> None:
    schedulers: list[Scheduler] = [Slurm(), Local()]
    assert schedulers


def test_runs_detached_and_appends_to_its_log(local: Local, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "leak")
    log = tmp_path / "job.log"
    log.write_text("before\n")
    script = 'echo "$1"; echo oops >&2; ps -o sid= -p $$; readlink /proc/self/fd/0; echo "[${SLURM_JOB_ID-}]"'
    job = start(local, tmp_path, script)
    wait_for(lambda: local.job(job) is None)
    pid = job.id.split("-")[1]
    lines = [line.strip() for line in log.read_text().splitlines()]
    assert lines == ["before", str(tmp_path), "oops", pid, "/dev/null", "[]"]


def test_running_then_gone(local: Local, tmp_path: Path) -> None:
    job = start(local, tmp_path, f"until [[ -e {tmp_path}/go ]]; do sleep 0.02; done")
    view = local.job(job)
    assert view and (view.word, view.restarts, view.nodes) == ("RUNNING", 0, os.uname().nodename)
    assert list(local.jobs([job, JobId("local-1-1")])) == [job]
    assert Local().job(job) == view, "another process finds it, too"
    (tmp_path / "go").touch()
    wait_for(lambda: local.job(job) is None)


def test_an_unreaped_child_is_gone(local: Local, tmp_path: Path) -> None:
    job = start(local, tmp_path, "exit 3")
    wait_for(lambda: Local().job(job) is None)  # a Local that is not the parent cannot reap it


def test_outlives_who_started_it(tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text("exec sleep 30")
    program = (
        "from pathlib import Path; from slurmddp.cluster.local import Local; import sys; p = Path(sys.argv[1]);"
        "print(Local().submit(('bash', str(p / 'job.sh')), p, log=p / 'job.log'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True, timeout=20
    )
    job = JobId.parse(done.stdout)
    local = Local()
    assert local.job(job)
    assert local.cancel(job) is True
    wait_for(lambda: local.job(job) is None)
    assert local.cancel(job) is False


def test_cancel_reaches_the_whole_group(local: Local, tmp_path: Path) -> None:
    job = start(
        local,
        tmp_path,
        f"trap 'echo trapped' TERM; bash -c 'trap \"echo child >>{tmp_path}/child; exit\" TERM; "
        f"touch {tmp_path}/up; while :; do sleep 0.02; done' & wait; wait",
    )
    wait_for((tmp_path / "up").exists)
    assert local.cancel(job) is True
    wait_for(lambda: local.job(job) is None)
    assert "trapped" in (tmp_path / "job.log").read_text()
    wait_for((tmp_path / "child").exists)


def test_a_recycled_process_id_is_another_job(local: Local, tmp_path: Path) -> None:
    job = start(local, tmp_path, "exec sleep 30")
    _, pid, started = job.id.split("-")
    other = JobId(f"local-{pid}-{int(started) - 1}")
    assert local.job(other) is None
    assert local.cancel(other) is False
    assert local.job(job), "the process with this id was not touched"


def test_a_name_with_spaces_and_parentheses(local: Local, tmp_path: Path) -> None:
    odd = tmp_path / "a) R 1 (b"
    odd.symlink_to("/bin/sleep")
    job = local.submit((str(odd), "30"), tmp_path, log=tmp_path / "job.log")
    wait_for(lambda: b"a) R 1 (b" in Path(f"/proc/{job.id.split('-')[1]}/stat").read_bytes())
    assert local.job(job)


def test_bad_input(local: Local, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"job\.log"):
        local.submit(("bash",), tmp_path, log=tmp_path / "absent" / "job.log")
    with pytest.raises(UserError, match="could not be started"):
        local.submit(("/absent/bash",), tmp_path, log=tmp_path / "job.log")
    with pytest.raises(UserError, match="Slurm job"):
        local.job(JobId("42"))
    with pytest.raises(UserError, match="no queue"):
        local.requeue(JobId("local-1-1"))
