"""The supervisor's loop and the one child process that touches the run folder, each played by a program of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurmddp.supervisor import files
from tests.helpers import ROOT

OLD = sorted(Path.home().glob(".pyenv/versions/3.6.*/bin/python"))
PROGRAM = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
from slurmddp.supervisor.loop import Loop
from slurmddp.supervisor.folder import Folder, Unavailable
run = {run!r}
loop = Loop()
folder = Folder(loop, run)
child = int(open("/proc/self/task/%d/children" % os.getpid()).read().split()[0])
def hung():
    began = time.monotonic()
    try:
        folder.ask("stop", patience=0.3)
    except Unavailable:
        return time.monotonic() - began < 2
    return False
"""


@pytest.fixture(params=[pytest.param(sys.executable, id="new"), pytest.param(OLD[-1:], id="3.6")])
def python(request: pytest.FixtureRequest) -> str:
    if not request.param:
        pytest.skip("no Python 3.6 here")
    return str(request.param if isinstance(request.param, str) else request.param[0])


def play(python: str, run: Path, text: str, *, make: bool = False) -> list[str]:
    if make:
        run.mkdir()
    program = PROGRAM.format(root=str(ROOT), run=str(run)) + text
    done = subprocess.run([python, "-IBc", program], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_folder_that_hangs_stops_nobody_and_nothing_is_lost(python: str, tmp_path: Path) -> None:
    """The child is stopped, as a mount that hangs stops whoever touches it."""
    text = """
os.kill(child, signal.SIGSTOP)
folder.tell("append", "events.jsonl", "one")
print(hung(), hung(), folder.behind)
os.kill(child, signal.SIGCONT)
folder.tell("append", "events.jsonl", "two")
print(folder.settle(5), folder.ask("read", "events.jsonl").split(), folder.ask("stop"))
"""
    assert play(python, tmp_path, text) == ["True True True", "True ['one', 'two'] None"]


def test_a_child_that_is_killed_is_replaced_and_what_it_had_not_written_is_written(python: str, tmp_path: Path) -> None:
    text = """
os.kill(child, signal.SIGSTOP)
folder.tell("append", "events.jsonl", "one")
os.kill(child, signal.SIGKILL)
print(folder.settle(5), folder.ask("read", "events.jsonl").split())
"""
    assert play(python, tmp_path, text) == ["True ['one']"]


def test_what_cannot_be_written_is_tried_again_in_its_order(python: str, tmp_path: Path) -> None:
    """A folder that comes back: here, one that is made later."""
    text = """
folder.tell("append", "later/events.jsonl", "one")
folder.tell("append", "events.jsonl", "two")
print(folder.settle(0.5), folder.ask("read", "events.jsonl"))
os.mkdir(run + "/later")
print(folder.settle(10), folder.ask("read", "events.jsonl").split(), folder.ask("read", "later/events.jsonl").split())
"""
    assert play(python, tmp_path, text) == ["False None", "True ['two'] ['one']"]


def test_a_signal_is_handled_while_the_loop_waits_and_not_within_another(python: str, tmp_path: Path) -> None:
    text = """
seen = []
def handler():
    seen.append("begins")
    if len(seen) == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    loop.rest(0.2)
    seen.append("ends")
loop.on_signal(signal.SIGTERM, handler)
os.kill(os.getpid(), signal.SIGTERM)
sleep = loop.start(["sleep", "60"])
loop.run_until(lambda: len(seen) == 4, 5)
sleep.kill()
print(*seen, loop.run_until(lambda: sleep.code is not None, 5), sleep.code)
loop.be_deaf()
os.kill(os.getpid(), signal.SIGTERM)
print(loop.run(["sh", "-c", "echo out; echo err >&2; exit 3"], 5), loop.run(["sleep", "9"], 0.2).code, len(seen))
"""
    assert play(python, tmp_path, text) == [
        "begins ends begins ends True 143",
        "Output(code=3, text='out\\n') None 4",
    ]


def test_half_a_line_is_not_joined_and_not_read(python: str, tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"event": "requeued"}\n{"half')
    text = """
found = folder.ask("begin", 0)
folder.tell("append", "events.jsonl", "whole")
lines = folder.ask("new_lines", found["length"])[1]
print(found["names"], lines, folder.ask("forget_stop"), folder.ask("ask_to_stop", "one", False))
print(folder.ask("ask_to_stop", "two", False), folder.ask("stop"), folder.ask("forget_stop"), folder.ask("stop"))
folder.ask("ask_to_stop", "cancelled by the user", False)
print(folder.ask("forget_stop"), folder.ask("stop"))
"""
    assert play(python, tmp_path, text) == [
        "['requeued'] ['{\"half', 'whole'] None True",
        "False one None None",
        "None cancelled by the user",
    ]


def test_a_write_that_fails_for_another_reason_than_the_disk_is_said_once(python: str, tmp_path: Path) -> None:
    text = """
folder.complain = print
folder.tell("append", "events.jsonl", 3)
folder.tell("append", "events.jsonl", 4)
folder.tell("append", "events.jsonl", "one")
print(folder.settle(5), folder.ask("read", "events.jsonl").split())
"""
    said, rest = play(python, tmp_path, text)
    assert said.startswith("the run folder's append failed, and is not tried again: AttributeError: ")
    assert rest == "True ['one']"


def test_who_has_patience_is_not_answered_with_an_error_of_the_disk(python: str, tmp_path: Path) -> None:
    """A run folder that is away for some seconds; whoever has none hears of it at once."""
    text = """
os.rename(run, run + "-away")
try:
    folder.ask("begin", 0)
except Unavailable as error:
    print(str(error).split(":")[0])
loop.start(["sh", "-c", 'sleep 1; mv "$0-away" "$0"', run])
print(folder.ask("begin", 0, patience=15)["names"], os.path.exists(run + "/job_began"))
"""
    assert play(python, tmp_path / "run", text, make=True) == ["FileNotFoundError", "[] True"]


def test_nothing_piles_up_behind_a_folder_that_hangs(python: str, tmp_path: Path) -> None:
    text = """
os.kill(child, signal.SIGSTOP)
print([hung() for _ in range(3)], folder._number)
os.kill(child, signal.SIGCONT)
print(folder.ask("stop", patience=15), folder._answers, folder._late)
"""
    assert play(python, tmp_path, text) == ["[True, True, True] 1", "None {} set()"]


@pytest.mark.skipif(os.getuid() != 0, reason="giving a folder to another user takes root")
def test_in_another_users_folder_nothing_is_read_or_written(python: str, tmp_path: Path) -> None:
    text = """
os.chown(run, 65534, -1)
folder.tell("append", "events.jsonl", "x")
said = []
folder.complain = said.append
for name in ("stop", "ledger"):
    try:
        folder.ask(name)
    except Unavailable as error:
        print("belongs to another user" in str(error))
print(folder.settle(5), len(said), os.listdir(run))
"""
    assert play(python, tmp_path, text) == ["True", "True", "True 1 []"]


def test_a_line_without_end_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_PART", 8)
    (tmp_path / "events.jsonl").write_bytes(b"one\n" + b"x" * 20 + b"\ntwo\nth")
    begin, seen = 0, []
    for _ in range(9):
        begin, lines = files.Files(str(tmp_path)).new_lines(begin)
        seen += lines
    assert (seen[0], seen[-1], begin) == ("one", "two", 29)


@pytest.mark.skipif(os.getuid() != 0, reason="giving a folder to another user takes root")
def test_a_folder_that_another_user_puts_in_its_place_is_not_used(python: str, tmp_path: Path) -> None:
    """Not even right after a look at its owner."""
    text = """
folder.ask("write", "name", "ours")
os.rename(run, run + "-ours")
os.mkdir(run)
open(run + "/name", "w").write("theirs")
os.chown(run, 65534, -1)
print(folder.ask("read", "name"))
folder.ask("write", "other", "ours")
print(os.listdir(run), os.path.exists(run + "-ours/other"))
try:
    folder.ask("append", "none/such", "x")
except Unavailable:
    pass
try:
    folder.ask("read", "name")
except Unavailable as error:
    print("belongs to another user" in str(error))
"""
    assert play(python, tmp_path / "run", text, make=True) == ["ours", "['name'] True", "True"]


def test_what_does_not_hurry_is_read_and_written_seldom(tmp_path: Path) -> None:
    """Thousands of jobs look at one file system."""
    run, logs = files.Files(str(tmp_path)), tmp_path / "logs" / "attempt-001"
    logs.mkdir(parents=True)
    (logs / "srun.err").write_text("srun: error: Task launch for StepId=7.0 failed on node n1: Down\n")
    found = run.look(1, str(logs), 0, False, True)
    assert set(found) == {"marker", "stop", "events"} and run.heartbeat() is None
    assert run.look(1, str(logs), 0, True, False)["unreached"] == [("n1", "Down")] and run.heartbeat() is None
    run.look(1, str(logs), 0, True, True)
    assert run.heartbeat() is not None


def test_paths_of_logs_hold_wherever_the_folder_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run" / "logs").mkdir(parents=True)
    run = files.Files(str(tmp_path / "run"))
    run.enter()
    number, logs = run.open_attempt(0)
    assert (number, logs) == (0, f"{tmp_path}/run/logs/attempt-000") and run.newest_attempt() == 0
    Path(logs, "srun.err").write_text("srun: error: Task launch for StepId=7.0 failed on node n1: Down\n")
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    assert run.unreached(logs) == [("n1", "Down")]
