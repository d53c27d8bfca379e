"""A script of the user's own starts as with plain python, and ends with its agent."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from .harness import PATIENCE, ROOT, free_port

TELL = """\
import json, os, signal, sys
import beside
print(json.dumps({
    "argv": sys.argv, "path": sys.path, "main": __name__, "file": __file__, "package": __package__,
    "orig": sys.orig_argv, "flags": list(sys.flags), "xoptions": sys._xoptions, "executable": sys.executable,
    "environ": {key: value for key, value in os.environ.items() if key != "_"},
    "stdin": sys.stdin.buffer.read().hex(), "cwd": os.getcwd(), "umask": os.umask(0),
    "signals": {str(number): str(signal.getsignal(number)).split(" at ")[0] for number in signal.valid_signals()},
    "mask": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
    "files": sorted(os.listdir("/proc/self/fd")), "session": os.getsid(0) == os.getpid(),
    "modules": sorted(name for name in sys.modules if "slurmddp" in name),
}))
"""
#: It says its pid, and then waits on standard input, which nobody closes.
WAIT = "import os, sys\nprint(os.getpid(), flush=True)\nsys.stdin.read()\n"
#: An agent: starts its one argument as torchrun does, and waits.
AGENT = "import subprocess, sys\nsubprocess.Popen(sys.argv[1:], start_new_session=True).wait()\n"
BEGIN = ["-m", "slurmddp.runtime.begin"]


def variables(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "TORCHELASTIC_RUN_ID": "1", **more}


def tell(script: Path, words: list[bytes], options: list[str], begin: list[str]) -> dict[str, Any]:
    command = [sys.executable, *options, *begin, str(script), *words]
    done = subprocess.run(
        command,
        input=b"from \0 standard input\n",
        capture_output=True,
        env=variables(SLURMDDP_RUN="/a run"),
        cwd=script.parents[1],
        check=True,
        timeout=PATIENCE,
    )
    assert done.stderr == b""
    return json.loads(done.stdout)


@pytest.mark.parametrize("options", [["-u"], ["-u", "-X", "utf8=1", "-W", "ignore", "-O"]])
def test_the_script_sees_what_plain_python_shows_it(tmp_path: Path, options: list[str]) -> None:
    script = tmp_path / "a project" / "own.py"
    script.parent.mkdir()
    script.write_text(TELL)
    (script.parent / "beside.py").write_text("")
    # Names that would be found first, were the working folder on the script's path
    (tmp_path / "beside.py").write_text("raise SystemExit('the wrong one')")
    words = [b"--lr", b"3e-4", b"a b", b"", b"-m", b"-c", b"'$HOME' `x`\n", b"\xff\xfe", "ä".encode(), b"--"]
    plain, begun = (tell(script, words, options, begin) for begin in ([], BEGIN))
    assert begun == plain
    assert len(plain["argv"]) == 1 + len(words) and plain["path"][0] == str(script.parent)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("pass", 0),
        ("raise SystemExit(37)", 37),
        ("raise ValueError('of mine')", 1),
        ("import os; os._exit(141)", 141),
        ("import os; os.kill(os.getpid(), 15)", -signal.SIGTERM),
        ("import os; os.abort()", -signal.SIGABRT),
    ],
)
def test_the_end_is_the_scripts_own(tmp_path: Path, body: str, code: int) -> None:
    script = tmp_path / "own.py"
    script.write_text(body)
    runs = [
        subprocess.run(
            [sys.executable, *begin, str(script)], env=variables(), capture_output=True, check=False, timeout=PATIENCE
        )
        for begin in ([], BEGIN)
    ]
    assert [run.returncode for run in runs] == [code, code]
    assert runs[0].stderr == runs[1].stderr and runs[0].stdout == runs[1].stdout


def test_a_module_is_what_python_m_starts_without_the_working_folder(tmp_path: Path) -> None:
    code, here = tmp_path / "code", tmp_path / "here"
    for folder in (code, here):
        (folder / "pkg").mkdir(parents=True)
        (folder / "pkg" / "beside.py").write_text(f"NAME = {folder.name!r}")
    (code / "pkg" / "own.py").write_text(
        "import json, sys\nfrom .beside import NAME\n"
        "print(json.dumps([NAME, __name__, __package__, __spec__.name, sys.argv, sorted(globals()), sys.path[0]]))\n"
    )
    path = f"{ROOT}{os.pathsep}{code}"
    shown = {}
    for cwd, begin in ((code, []), (here, BEGIN)):
        command = [sys.executable, *begin, "-m", "pkg.own", "--lr", "1"]
        done = subprocess.run(command, cwd=cwd, env=variables(PYTHONPATH=path), capture_output=True, check=True)
        shown[cwd] = json.loads(done.stdout)
    *plain, _ = shown[code]
    *begun, first = shown[here]
    assert begun == plain and plain[0] == "code" and plain[4] == [str(code / "pkg" / "own.py"), "--lr", "1"]
    assert first == str(ROOT)
    missing = [sys.executable, *BEGIN, "-m", "pkg.none"]
    failed = subprocess.run(missing, cwd=here, env=variables(PYTHONPATH=path), capture_output=True, text=True)
    assert failed.returncode == 1 and "No module named pkg.none" in failed.stderr


def test_bash_runs_a_script_and_programs_in_it_are_not_the_rank(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    fails = f'{sys.executable} -c "import nothing_of_this_name" 2>/dev/null'
    script.write_text(f'echo "$0 $1 $$"\n{fails} || echo caught\n[ "$1" = go ] || exec {fails}\nexit 37\n')
    run = tmp_path / "run"
    (run / "markers").mkdir(parents=True)
    environ = variables(SLURMDDP_RUN=str(run), SLURMDDP_ATTEMPT="0", RANK="0", WORLD_SIZE="1")
    command = [sys.executable, *BEGIN, "bash", str(script)]
    with subprocess.Popen([*command, "go"], env=environ, stdout=subprocess.PIPE, text=True) as begun:
        said = begun.communicate(timeout=PATIENCE)[0]
    assert (begun.returncode, said) == (37, f"{script} go {begun.pid}\ncaught\n")
    assert not list((run / "markers").iterdir()), "the error of a program that the script started is its own matter"
    assert subprocess.run([*command, "stop"], env=environ, capture_output=True, check=False).returncode == 1
    assert (run / "markers" / "attempt-000.json").is_file(), "that of `exec python` is the rank's"


@pytest.mark.parametrize("words", [[], ["-m"], ["bash"]])
def test_without_a_program_it_says_how_it_is_used(words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *BEGIN, *words], env=variables(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and done.stderr.startswith("slurmddp: error: usage: ")


def test_a_missing_script_is_pythons_own_message(tmp_path: Path) -> None:
    command = [sys.executable, *BEGIN, str(tmp_path / "none.py")]
    done = subprocess.run(command, env=variables(), capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 2 and "can't open file" in done.stderr


@contextmanager
def agent_of(script: Path, begin: list[str]) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """An agent and the pid of its worker, which has come as far as its script."""
    command = [sys.executable, "-c", AGENT, sys.executable, *begin, str(script)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables(SLURMDDP_RUN="/a run")
    ) as agent:
        assert agent.stdout is not None
        worker = int(agent.stdout.readline())
        try:
            yield agent, worker
        finally:
            for pid in (worker, agent.pid):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass


def wait_until_gone(descriptor: int, seconds: float) -> bool:
    return bool(select.select([descriptor], [], [], seconds)[0])


def test_a_rank_ends_with_its_agent(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(WAIT)
    with agent_of(script, BEGIN) as (agent, worker):
        watched = os.pidfd_open(worker)
        agent.kill()
        assert wait_until_gone(watched, 30)
        os.close(watched)


def test_without_it_a_rank_outlives_its_agent(tmp_path: Path) -> None:
    """What the module is for; the pipe on its standard input stays open."""
    script = tmp_path / "own.py"
    script.write_text(WAIT)
    with agent_of(script, []) as (agent, worker):
        watched = os.pidfd_open(worker)
        agent.kill()
        agent.wait()
        assert not wait_until_gone(watched, 0.5)
        os.close(watched)


def test_an_orphan_does_not_start(tmp_path: Path) -> None:
    """Its agent is gone before it has come as far as asking to die with it."""
    script = tmp_path / "own.py"
    script.write_text(f"open({str(tmp_path / 'started')!r}, 'w')")
    said = tmp_path / "said"
    # The shell ends at once; what it started waits until it is adopted, by init or by whoever reaps here.
    wait = "while [ $(ps -o ppid= -p $BASHPID) = $$ ]; do :; done"
    body = f"( {wait}; exec {sys.executable} {' '.join(BEGIN)} {script} )"
    subprocess.run(
        ["bash", "-c", f"{body} >{said} 2>&1 & echo started"],
        env={**variables(SLURMDDP_RUN="/the rank's"), "PATH": os.environ["PATH"]},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    deadline = time.monotonic() + 60
    while "the torchrun agent has exited, so this rank does not start" not in (
        said.read_text() if said.exists() else ""
    ):
        assert time.monotonic() < deadline and not (tmp_path / "started").exists()
        time.sleep(0.05)
    assert not (tmp_path / "started").exists()


@pytest.mark.ranks(2)
def test_workers_of_a_killed_torchrun_are_gone(tmp_path: Path) -> None:
    """The real launcher; the script sleeps for good and has no watch of its own."""
    script = tmp_path / "own.py"
    script.write_text(
        "import os, pathlib, time\n"
        f"pathlib.Path({str(tmp_path)!r}, 'pid-' + os.environ['RANK']).write_text(str(os.getpid()))\n"
        "while True: time.sleep(3600)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2"]
    command += ["--master-addr=127.0.0.1", f"--master-port={free_port()}", *BEGIN, str(script)]
    with subprocess.Popen(command, env=variables(SLURMDDP_RUN="/a run"), stderr=subprocess.DEVNULL) as agent:
        deadline = time.monotonic() + 90
        pids: list[int] = []
        while len(pids) < 2:
            assert time.monotonic() < deadline and agent.poll() is None
            pids = [int(path.read_text()) for path in tmp_path.glob("pid-*") if path.read_text()]
            time.sleep(0.05)
        watched = [os.pidfd_open(pid) for pid in pids]
        agent.kill()
        assert all(wait_until_gone(descriptor, 30) for descriptor in watched)


def test_a_sitecustomize_of_ones_own_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('mine')\n")
    (tmp_path / "own.py").write_text("import os, sys\nprint(os.environ['PYTHONPATH'], sys.path[1:3])\n")
    path = f"{ROOT}{os.pathsep}{tmp_path}"
    runs = [
        subprocess.run(
            [sys.executable, *begin, str(tmp_path / "own.py")], env=variables(PYTHONPATH=path), capture_output=True,
            text=True, check=True, timeout=PATIENCE,
        ).stdout
        for begin in ([], BEGIN)
    ]  # fmt: skip
    # The start of begin itself loads it, too.
    assert runs[1] == "mine\n" + runs[0]
