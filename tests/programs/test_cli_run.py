"""`slurmddp run` and the ways in which a user leaves it: whatever ends the command also ends the job, and says so."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers import Desk

#: Stands for torchrun and its ranks: prints for ten seconds, and exits as soon as the stop file asks it to.
RANKS = """#!/bin/bash
for ((line = 0; line < 500; line++)); do
  echo "line $line"
  [[ ! -e "$SLURMDDP_STOP_FILE" ]] || exit 0
  sleep 0.02
done
"""

#: Runs `slurmddp` and sends it SIGINT just before the N-th line of code that follows the job: `python DRIVER N ARGS...`
DRIVER = """
import os, signal, sys

moment, seen = int(sys.argv.pop(1)), 0

def trace(frame, event, argument):
    global seen
    if not frame.f_code.co_filename.endswith(("commands/run.py", "run/logs.py")):
        return None
    if event == "line" and frame.f_code.co_name not in ("<module>", "run"):
        seen += 1
        if seen == moment:
            os.kill(os.getpid(), signal.SIGINT)
    return trace

signal.signal(signal.SIGINT, signal.default_int_handler)
from slurmddp.commands.app import main
sys.settrace(trace)
main()
"""


@pytest.fixture
def ready(desk: Desk) -> Desk:
    desk.write("train.py", "")
    desk.program("ranks", RANKS)
    desk.write("driver.py", DRIVER)
    return desk


def start(desk: Desk, *arguments: str, runs: str = "runs", stderr: int = subprocess.PIPE) -> subprocess.Popen[str]:
    options = ["--site", "here", "--set", f"container.python={desk.bin}/ranks", "--set", f"paths.runs={runs}"]
    return subprocess.Popen(
        [sys.executable, *arguments, "run", "train.py", *options], cwd=desk.project, env=desk.environment, text=True,
        stdout=subprocess.PIPE, stderr=stderr, preexec_fn=own_signals,
    )  # fmt: skip


def own_signals() -> None:
    """The tests may ignore SIGINT (a shell's background job) or SIGHUP (nohup); a user's command does not."""
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and stderr."""
    try:
        _, err = process.communicate(timeout=240)
    finally:
        process.kill()
    return process.returncode, err or ""


def alive(folder: Path) -> list[str]:
    """The command lines of all processes that have `folder` or something below it in them; at359 is not below at35."""
    mention = re.compile(re.escape(str(folder)) + r"(?![\w.-])")
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if mention.search(command):
            found.append(command)
    return found


def wait_for(path: Path, pattern: str) -> Path:
    for _ in range(300):
        found = list(path.glob(pattern))
        if found:
            return found[0]
        time.sleep(0.05)
    raise AssertionError(f"no {path}/{pattern} within 15 s")


def state(desk: Desk, run: Path) -> str:
    return desk.command("status", str(run)).out.split("state    ")[1].splitlines()[0]


MAIN = "from slurmddp.commands.app import main\nmain()"

#: The first lines are before the job starts, the next ones start and record it; from about 60 on its output is shown.
MOMENTS = [*range(8, 56, 16), *range(56, 400, 120)]


@pytest.mark.parametrize("first", [0, *(pytest.param(offset, marks=pytest.mark.long) for offset in range(1, 16))])
def test_ctrl_c_at_any_line_of_the_code_that_follows_ends_the_job(ready: Desk, first: int) -> None:
    moments = [moment + first for moment in MOMENTS]
    started = {moment: start(ready, "driver.py", str(moment), runs=f"at{moment}") for moment in moments}
    begun = 0
    for moment, process in started.items():
        code, err = finish(process)
        runs = ready.project / f"at{moment}"
        assert not alive(runs), f"moment {moment}: still there: {alive(runs)}\n{err}"
        if list(runs.glob("*/submission.json")):
            begun += 1
            assert code == 1 and "asked to save" in err and "Traceback" not in err, f"moment {moment}: {code}\n{err}"
        else:
            assert code == 130, f"moment {moment}: {code}\n{err}"
    assert begun >= 2  # Python 3.13 counts more lines before the job starts than 3.11.


def test_attach_runs_a_command_as_the_ranks_run(ready: Desk) -> None:
    process = start(ready, "-m", "slurmddp")
    assert process.stdout is not None
    process.stdout.readline()
    words = ("sh", "-c", "echo $SLURMDDP_RENDEZVOUS_ID $PYTHONPATH; exit 7")
    done = ready.command("debug", "shell", "last", "--", *words)
    (run,) = (ready.project / "runs").iterdir()
    (run / "stop").touch()
    finish(process)
    assert done.code == 7 and done.err == ""
    name, path = done.out.split()
    assert (
        name.startswith(f"{run.name}-local-") and name.endswith("-0") and path.split(":")[0].endswith(f"/{name}/code")
    )
    again = ready.command("debug", "shell", "last")
    assert again.code == 2 and f"run {run.name} is not running: " in again.err


def test_run_into_head_cancels_the_run_and_says_so(ready: Desk) -> None:
    process = start(ready, "-m", "slurmddp")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()  # what `| head -1` does
    process.stdout = None
    code, err = finish(process)
    (run,) = (ready.project / "runs").iterdir()
    assert not alive(run)
    assert code == 1 and "Traceback" not in err
    assert f"the output was closed: cancelling run {run.name}" in err
    assert state(ready, run).startswith("cancelled")


def test_output_and_messages_that_nobody_reads(ready: Desk) -> None:
    """`run 2>&1 | head -1`"""
    process = start(ready, "-m", "slurmddp", stderr=subprocess.STDOUT)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(60) == 1
    (run,) = (ready.project / "runs").iterdir()
    assert not alive(run)


@pytest.mark.parametrize("signum", [signal.SIGHUP, signal.SIGTERM])
def test_a_lost_terminal_and_sigterm_end_the_job(ready: Desk, signum: signal.Signals) -> None:
    process = start(ready, "-m", "slurmddp")
    wait_for(ready.project, "runs/*/logs/attempt-*/*.log")
    process.send_signal(signum)
    code, _ = finish(process)
    (run,) = (ready.project / "runs").iterdir()
    assert not alive(run)
    assert code != 0 and state(ready, run).startswith("cancelled")


def test_a_hangup_that_the_user_has_ruled_out_is_ignored(ready: Desk) -> None:
    """`nohup slurmddp run`"""
    process = start(ready, "-c", "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + MAIN)
    run = wait_for(ready.project, "runs/*/logs/attempt-*/*.log").parents[2]
    process.send_signal(signal.SIGHUP)
    time.sleep(1)
    assert process.poll() is None and not (run / "stop").exists()
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 1


def test_three_times_ctrl_c_kills_ranks_that_do_not_exit(ready: Desk) -> None:
    ready.program(
        "ranks", "#!/bin/bash\n[[ $1 != -c ]] || exit 0\ntrap 'echo no' TERM\nwhile true; do sleep 0.1; done\n"
    )
    process = start(ready, "-m", "slurmddp")
    run = wait_for(ready.project, "runs/*/logs/attempt-*/*.log").parents[2]
    for seconds in (0.5, 0.5, 0):
        process.send_signal(signal.SIGINT)
        time.sleep(seconds)
    code, err = finish(process)
    assert code == 1 and "killing" in err
    assert not alive(run)
    assert state(ready, run) == "cancelled"


def test_a_run_that_was_done_when_ctrl_c_came_is_done(ready: Desk) -> None:
    ready.program("ranks", "#!/bin/bash\necho line\n")
    process = start(ready, "-m", "slurmddp")
    run = wait_for(ready.project, "runs/*/logs/job.log").parents[1]
    assert finish(process)[0] == 0 and state(ready, run).startswith("done")
