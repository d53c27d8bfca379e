"""The sweep on real processes: all that an attempt left is ended, and nothing else."""

from __future__ import annotations

import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from slurmddp.run.snapshot import copy_runtime
from tests.helpers import supervisor
from tests.unit.supervisor.test_supervisor_folder import python as python

#: Says that it runs, and then waits: for good, however often its standard streams are closed.
WAIT = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(3600)"
#: The same with a child that has nothing in its environment, as after `env -i`.
PARENT = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", {WAIT!r}], env={{}}, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(3600)
"""
#: Maps a new segment of the given name, and waits.
MAPS = """
import mmap, os, sys, time
descriptor = os.open("/dev/shm/" + sys.argv[1], os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
os.ftruncate(descriptor, 4096)
memory = mmap.mmap(descriptor, 4096)
os.close(descriptor)
print(flush=True)
time.sleep(3600)
"""


@dataclass
class Node:
    """One host with a run folder, and the processes of this test."""

    root: Path
    program: tuple[str, ...]
    own: str
    other: str
    within: tuple[str, ...] = ()  # before each command
    started: list[subprocess.Popen[str]] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)

    @property
    def variables(self) -> dict[str, str]:
        plain = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "TORCHELASTIC"))}
        folder = str(self.root / "disk")
        return {**plain, "SLURM_JOB_ID": "77", "SLURMD_NODENAME": "node7", "SLURMDDP_NODE_FOLDER": folder}

    def start(self, *words: str, code: str = WAIT, drop: tuple[str, ...] = (), **more: str) -> subprocess.Popen[str]:
        """A process with these variables, as far as its first line."""
        variables = {name: value for name, value in {**self.variables, **more}.items() if name not in drop}
        command = [*self.within, sys.executable, "-S", "-c", code, *words]
        process = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True, start_new_session=True)
        self.started.append(process)
        return process

    def rank(self, attempt: str, *words: str, **more: str) -> subprocess.Popen[str]:
        return self.start(*words, SLURMDDP_RENDEZVOUS_ID=attempt, SLURMDDP_NODE="node7", **more)

    def sweep(self, attempt: str, **more: str) -> list[str]:
        """The lines of the report."""
        variables = {
            **self.variables,
            "SLURMDDP_SWEEP": attempt,
            "SLURMDDP_RENDEZVOUS_ID": attempt,
            "SLURMDDP_RUN": str(self.root / "run"),
            "SLURMDDP_LOGS": str(self.root / "run" / "logs"),
            **more,
        }
        done = subprocess.run(
            [*self.within, *self.program],
            env=variables, capture_output=True, text=True, check=False, timeout=240,
        )  # fmt: skip
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        report = self.root / "run" / "logs" / "sweep" / "node7"
        lines = report.read_text().splitlines()
        report.unlink()
        assert os.listdir(report.parent) == []
        return lines

    def segment(self, name: str) -> Path:
        path = Path("/dev/shm") / name
        self.files.append(path)
        return path


def line_of(process: subprocess.Popen[str]) -> str:
    """Its next line. No select() before it: two lines that came at once are both in the stream's buffer by then."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def alive(*processes: subprocess.Popen[str]) -> bool:
    return all(process.poll() is None for process in processes)


def killed(process: subprocess.Popen[str]) -> bool:
    return process.wait(30) == -signal.SIGKILL


def found(lines: list[str], kind: str) -> set[str]:
    return {line.split()[1] for line in lines if line.startswith(f"{kind} ")}


@pytest.fixture
def node(tmp_path: Path, python: str) -> Iterator[Node]:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "disk").mkdir()
    unique = secrets.token_hex(4)
    here = Node(tmp_path, tuple(supervisor("sweep", python)), f"gpt-{unique}-77-0", f"gpt-{unique}-77-1")
    try:
        yield here
    finally:
        for process in here.started:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        for path in here.files:
            path.unlink(missing_ok=True)


def test_a_clean_node_has_an_empty_report(node: Node) -> None:
    assert node.sweep(node.own) == []


@pytest.mark.parametrize("cleaned", [False, True])
def test_what_an_attempt_left_is_killed(node: Node, cleaned: bool) -> None:
    """Also in a container that takes over none of Slurm's variables, and what ignores SIGTERM or is stopped."""
    marks = [
        {"SLURMDDP_RENDEZVOUS_ID": node.own, "SLURMDDP_NODE": "node7"},
        {"SLURMDDP_RENDEZVOUS_ID": node.own, "SLURMDDP_STEP": "train"},
        {"APPTAINERENV_SLURMDDP_RENDEZVOUS_ID": node.own, "APPTAINERENV_SLURMDDP_NODE": "node7"},
        {"TORCHELASTIC_RUN_ID": node.own},
    ]
    left = [node.start(drop=("SLURM_JOB_ID",) if cleaned else (), **variables) for variables in (*marks, marks[0])]
    for process in left:
        line_of(process)
    left[-1].send_signal(signal.SIGSTOP)
    assert found(node.sweep(node.own), "process") == {str(process.pid) for process in left}
    assert all(map(killed, left))


def test_children_without_an_environment_go_with_their_parent(node: Node) -> None:
    parent = node.rank(node.own, code=PARENT)
    child = int(line_of(parent))
    watched = os.pidfd_open(child)
    assert found(node.sweep(node.own), "process") == {str(parent.pid), str(child)}
    assert select.select([watched], [], [], 30)[0]
    os.close(watched)


@pytest.mark.parametrize("code", [WAIT, PARENT])
def test_the_other_attempt_beside_it_is_left_alone(node: Node, code: str) -> None:
    """Two attempts, one user, one node: each sweep ends its own, in whichever order."""
    own, other = node.rank(node.own, code=code), node.rank(node.other, code=code)
    line_of(own)
    line_of(other)
    lines = node.sweep(node.own)
    assert str(own.pid) in found(lines, "process") and str(other.pid) not in found(lines, "process")
    assert len(lines) == (2 if code == PARENT else 1)
    assert killed(own) and alive(other)
    assert str(other.pid) in found(node.sweep(node.other), "process")
    assert killed(other)


def test_what_only_looks_like_it_is_left_alone(node: Node) -> None:
    identity = {"SLURMDDP_RENDEZVOUS_ID": node.own}
    spared = [
        node.start(),
        node.start(**identity),  # job.sh's own helpers
        node.start(**identity, SLURMDDP_NODE="node7", SLURM_JOB_ID="78"),  # a job that a rank has submitted
        node.start(**identity, SLURMDDP_NODE="node7", SLURMDDP_SWEEP=node.own),  # another sweep
        node.start(SLURMDDP_RENDEZVOUS_ID=f"{node.own}0", SLURMDDP_NODE="node7"),  # attempt 00
        node.start(SLURMDDP_RENDEZVOUS_ID=f"x{node.own}", SLURMDDP_NODE="node7"),
        node.start(NOTE=f"SLURMDDP_RENDEZVOUS_ID={node.own}", SLURMDDP_NODE="node7"),
        node.start(f"SLURMDDP_RENDEZVOUS_ID={node.own}", SLURMDDP_NODE="node7"),  # an argument
    ]
    rank = node.rank(node.own)
    for process in (*spared, rank):
        line_of(process)
    assert found(node.sweep(node.own), "process") == {str(rank.pid)}
    assert killed(rank) and alive(*spared)


def test_jobs_and_runs_that_a_rank_started_are_left_alone(node: Node) -> None:
    """Its children as well: another job's, and another run's in the same allocation."""
    code = f"""
import os, subprocess, sys, time
for changes in ({{"SLURM_JOB_ID": "78"}}, {{"SLURMDDP_RENDEZVOUS_ID": {node.other!r}}}, {{}}):
    command = [sys.executable, "-S", "-c", {WAIT!r}]
    child = subprocess.Popen(command, env={{**os.environ, **changes}}, stdout=subprocess.PIPE)
    child.stdout.readline()
    print(child.pid, flush=True)
time.sleep(3600)
"""
    rank = node.rank(node.own, code=code)
    job, run, own = (int(line_of(rank)) for _ in range(3))
    try:
        assert found(node.sweep(node.own), "process") == {str(rank.pid), str(own)}
        for pid in (job, run):
            os.kill(pid, 0)
    finally:
        for pid in (job, run):
            os.kill(pid, signal.SIGKILL)


def test_the_guard_of_the_run_and_its_children_stay(node: Node) -> None:
    guard = node.root / "run" / "code" / "slurmddp.zip"
    guard.parent.mkdir(parents=True)
    guard.write_text('echo; "${@:3}" & wait\n')
    code = (
        f"import os; os.execvp('bash', ['bash', {str(guard)!r}, 'guard', {str(node.root / 'run')!r}, 'sleep', '3600'])"
    )
    process = node.rank(node.own, code=code)
    line_of(process)
    assert node.sweep(node.own) == []
    assert alive(process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + 30
    while not children.read_text().split():
        assert time.monotonic() < deadline
    for child in children.read_text().split():
        os.kill(int(child), signal.SIGKILL)


def test_a_sweep_below_a_process_of_the_attempt_spares_its_ancestors(node: Node) -> None:
    """As on one machine, where job.sh itself may have been started from a rank's shell."""
    logs = node.root / "run" / "logs"
    code = "import os, subprocess, sys\n"
    code += "sys.exit(subprocess.run(sys.argv[2:], env={**os.environ, 'SLURMDDP_SWEEP': sys.argv[1]}).returncode)"
    own = {"SLURMDDP_RUN": str(node.root / "run"), "SLURMDDP_LOGS": str(logs)}
    assert node.rank(node.own, node.own, *node.program, code=code, **own).wait(60) == 0
    assert (logs / "sweep" / "node7").read_text() == ""


def test_without_a_name_it_does_nothing(node: Node) -> None:
    process = node.rank("")
    line_of(process)
    variables = {**node.variables, "SLURMDDP_SWEEP": "", "SLURMDDP_RUN": "/x", "SLURMDDP_LOGS": str(node.root / "run")}
    done = subprocess.run(node.program, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and alive(process)


def test_processes_that_come_and_go_meanwhile(node: Node) -> None:
    """A rank that starts short-lived children all the time, beside strangers that do the same."""
    code = "import subprocess\nprint(flush=True)\nwhile True: subprocess.run(['true'])"
    own, other = node.rank(node.own, code=code), node.rank(node.other, code=code)
    line_of(own)
    line_of(other)
    lines = node.sweep(node.own)
    assert str(own.pid) in found(lines, "process")
    assert killed(own) and alive(other)
    assert node.sweep(node.own) == []


def test_shared_memory_that_a_killed_process_had(node: Node) -> None:
    """What the other attempt maps stays; so does what has a name of nobody we know."""
    unique = secrets.token_hex(4)
    mine, theirs, odd = (node.segment(f"{name}{unique}") for name in ("psm_a", "psm_b", "dataset-"))
    own, other = node.rank(node.own, mine.name, code=MAPS), node.rank(node.other, theirs.name, code=MAPS)
    third = node.rank(node.own, odd.name, code=MAPS)
    for process in (own, other, third):
        line_of(process)
    lines = node.sweep(node.own, SLURMDDP_STARTED="1")
    assert found(lines, "segment") == {mine.name}
    assert not mine.exists() and theirs.exists() and odd.exists()
    assert killed(own) and killed(third) and alive(other)


#: Opens the files that its arguments name, and waits.
OPENS = """
import sys, time
kept = [open(name, "a") for name in sys.argv[1:]]
print(flush=True)
time.sleep(3600)
"""


@pytest.fixture
def alone(node: Node) -> Iterator[Node]:
    """A node whose /dev/shm is new, beside a second file system that numbers its files in the same way."""
    if os.getuid() != 0:
        pytest.skip("mounting a file system needs root")
    second = node.root / "second"
    second.mkdir()
    mounts = 'mount -t tmpfs none /dev/shm && mount -t tmpfs none "$0" && echo && exec sleep 3600'
    command = ["unshare", "--mount", "sh", "-c", mounts, str(second)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            line_of(holder)
            node.within = ("nsenter", "--mount", "--target", str(holder.pid))
            yield node
        finally:
            holder.kill()


def test_a_file_with_the_same_number_on_another_device_protects_nothing(alone: Node) -> None:
    """An inode's number is unique on its device only. What somebody holds open in /dev/shm stays."""
    seen = Path(f"/proc/{alone.within[-1]}/root")  # what is mounted there
    shm, second = seen / "dev/shm", alone.root / "second"
    own = [alone.rank(alone.own, name, code=MAPS) for name in ("psm_free", "psm_held")]
    for process in own:
        line_of(process)
    others = [str(second / str(number)) for number in range(9)]
    line_of(alone.start("/dev/shm/psm_held", *others, code=OPENS))
    numbers = {Path(f"{seen}{name}").stat().st_ino for name in others}
    assert (shm / "psm_free").stat().st_ino in numbers, "the two file systems number their files alike"
    assert found(alone.sweep(alone.own), "segment") == {"psm_free"}
    assert (shm / "psm_held").exists() and all(map(killed, own))


def test_shared_memory_of_nobody_stays_while_others_live(node: Node) -> None:
    """Whose it was is not known; a stranger may open it by its name."""
    line_of(node.start())
    path = node.segment(f"torch_{secrets.token_hex(4)}")
    path.write_bytes(b"x")
    assert node.sweep(node.own, SLURMDDP_STARTED="1") == []
    assert path.exists()


#: Makes the segments that its arguments name and one of System V's, whose number it prints, and ends.
MAKES = """
import ctypes, sys
for name in sys.argv[1:]:
    open("/dev/shm/" + name, "x").close()
print(ctypes.CDLL(None).shmget(0, 4096, 0o600), flush=True)
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that any user may enter. pytest closes those of tmp_path to others, whenever another session starts."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.skipif(os.getuid() != 0, reason="needs a user of its own, without any other process")
def test_shared_memory_of_nobody_goes_where_no_other_can_want_it(node: Node, open_folder: Path) -> None:
    """A user whose processes are all gone; what is older than the attempt stays, and what has an unknown name."""
    user = 1_000_000 + secrets.randbelow(1_000_000)
    names = [f"{kind}{secrets.token_hex(4)}" for kind in ("torch_1_", "nccl-", "sem.mp-", "psm_", "dataset", "psm_old")]
    paths = [node.segment(name) for name in names]
    run = open_folder / "run"
    logs = run / "logs"
    logs.mkdir(parents=True)
    copy_runtime(run / "code")
    os.chown(logs, user, user)
    # Imported first: that user may not be allowed to read this Python's files.
    code = "import ctypes, os, signal, sys, time\nos.setgroups([])\n"
    code += f"os.setresgid({user}, {user}, {user})\nos.setresuid({user}, {user}, {user})\n"
    maker = node.start(*names, code=code + MAKES)
    number = line_of(maker)
    assert maker.wait(30) == 0
    os.utime(paths[-1], (1000, 1000))
    as_user = code + "os.execv(sys.argv[1], sys.argv[1:])"
    # that user may not be allowed to read another Python's files
    program = supervisor("sweep", "/usr/bin/python3", run / "code/slurmddp.zip")
    sweeper = [sys.executable, "-S", "-c", as_user, *program]

    def sweep() -> set[str]:
        variables = {"SLURMDDP_SWEEP": node.own, "SLURMDDP_RUN": str(run), "SLURMDDP_LOGS": str(logs)}
        variables["SLURMDDP_STARTED"] = str(int(paths[0].stat().st_mtime) - 1)
        subprocess.run(sweeper, env={**node.variables, **variables}, check=True, timeout=240)
        return found((logs / "sweep" / "node7").read_text().splitlines(), "segment")

    stranger = node.start(code=code + WAIT)
    line_of(stranger)
    assert sweep() == set() and all(path.exists() for path in paths)
    stranger.kill()
    stranger.wait()
    try:
        assert sweep() == {*names[:4], f"sysv:{number}"}
        assert [path.exists() for path in paths] == [False] * 4 + [True] * 2
    finally:
        subprocess.run(["ipcrm", "-m", number], check=False, capture_output=True)


def test_the_attempts_folder_goes_and_compilers_caches_stay(node: Node) -> None:
    folders = [node.root / "disk" / f"slurmddp-{os.getuid()}" / name for name in (node.own, node.other, "triton")]
    for folder in folders:
        (folder / "tmp").mkdir(parents=True)
        (folder / "tmp" / "file").write_text("x")
    assert node.sweep(node.own) == []
    assert not folders[0].exists() and all((folder / "tmp" / "file").exists() for folder in folders[1:])


def test_a_link_in_the_folders_place_is_not_followed(node: Node) -> None:
    kept = node.root / "kept" / node.own
    kept.mkdir(parents=True)
    (node.root / "disk" / f"slurmddp-{os.getuid()}").symlink_to(kept.parent)
    assert node.sweep(node.own) == []
    assert kept.is_dir()


@pytest.mark.parametrize("name", ["../../x", "a/b"])
def test_a_name_that_is_a_path_sweeps_nothing(node: Node, name: str) -> None:
    variables = {
        **node.variables,
        "SLURMDDP_SWEEP": name,
        "SLURMDDP_RUN": "/x",
        "SLURMDDP_LOGS": str(node.root / "run"),
    }
    done = subprocess.run(node.program, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "is no rendezvous id" in done.stderr
