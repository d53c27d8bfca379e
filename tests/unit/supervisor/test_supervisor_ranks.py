"""The stacks of real processes: ranks that answer, one with a locked interpreter, one that is stopped, one without."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from slurmddp.commands.debug.stacks import RankStacks, read_stacks
from tests.helpers import ROOT, supervisor
from tests.unit.supervisor.test_supervisor_folder import OLD

PROCESS = """
import os, re, subprocess, sys, threading, time
from slurmddp.runtime.watch.own_stacks import OwnStacks

def look():
    while True:
        own.look()
        time.sleep(0.02)

def waits():
    time.sleep(600)

def locked():
    re.match("(a+)+$", "a" * 60 + "b")

if sys.argv[1] == "bundled":
    from slurmddp.runtime.environment import Environment
    from slurmddp.runtime.watch import stop, watch
    own = Environment(rank=0, local_rank=0, local_world=1, world=1, attempt=0, node="here", stop_file=None)
    watch.Watch(own, stop.Stop(None)).install(parent=False)
    while not any("slurmddp-stacks" in os.path.realpath(f"/proc/self/fd/{number}") for number in range(3, 9)):
        time.sleep(0.05)
elif sys.argv[1] != "absent":
    own = OwnStacks()
    threading.Thread(target=look, daemon=True).start()
if sys.argv[1] == "worker" and os.fork() == 0:
    time.sleep(600)
print(flush=True)
locked() if sys.argv[1] == "locked" else waits()
"""
Start = Callable[[int, str], "subprocess.Popen[str]"]


@pytest.fixture
def name() -> str:
    return f"gpt-7-{secrets.token_hex(4)}"


@pytest.fixture
def start(name: str) -> Iterator[Start]:
    """Start a process as a rank."""
    started: list[subprocess.Popen[str]] = []

    def process(rank: int, does: str) -> subprocess.Popen[str]:
        of_rank = {"SLURMDDP_RENDEZVOUS_ID": name, "RANK": str(rank), "WORLD_SIZE": "6", "PYTHONPATH": str(ROOT)}
        child = subprocess.Popen(
            [sys.executable, "-c", PROCESS, does], env={**os.environ, **of_rank}, stdout=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        started.append(child)
        assert child.stdout is not None
        child.stdout.readline()
        return child

    yield process
    for child in started:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()


def stacks(name: str, python: str = sys.executable) -> tuple[list[RankStacks], list[int]]:
    words = [*supervisor("ranks", python), "stacks", name]
    environment = {**os.environ, "SLURMD_NODENAME": "node7"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    return read_stacks(done.stdout)


def test_each_rank_is_asked_in_the_way_that_it_can_answer(name: str, start: Start) -> None:
    doings = ("waits", "worker", "locked", "stopped", "absent")
    children = [start(rank, does) for rank, does in enumerate(doings)]
    os.kill(children[3].pid, signal.SIGSTOP)
    for _ in range(2):  # the memory keeps the answers of before
        found, missing = stacks(name)
        assert [(each.rank, each.answer) for each in found] == [
            (0, "asked"), (1, "asked"), (2, "signal"), (3, "silent"), (4, "absent"),
        ]  # fmt: skip
        assert missing == [5]
        assert [each.pid for each in found] == [child.pid for child in children]
        assert {each.node for each in found} == {"node7"} and found[3].state == "T"
        waits = ['File "<string>", line 11 in waits', 'File "<string>", line 29 in <module>']
        assert found[0].threads == found[1].threads == [waits], "the thread that answered is not shown"
        assert 'File "<string>", line 14 in locked' in found[2].threads[0]
        assert found[3].threads == found[4].threads == [[]]
    assert all(child.poll() is None for child in children), "looking harms no rank"
    os.kill(children[3].pid, signal.SIGCONT)
    assert stacks(name)[0][3].answer == "asked"


def test_the_thread_that_watches_a_bundled_rank_answers(name: str, start: Start) -> None:
    start(0, "bundled")
    (found,), _ = stacks(name)
    assert (found.answer, [len(frames) for frames in found.threads]) == ("asked", [2])


@pytest.mark.skipif(not OLD, reason="no Python 3.6 here")
def test_an_old_python_asks_as_well(name: str, start: Start) -> None:
    start(0, "waits")
    (found,), _ = stacks(name, str(OLD[-1]))
    assert found.answer == "asked" and found.threads[0]


def test_one_rank_is_killed_as_in_a_rehearsal(name: str, start: Start) -> None:
    children = [start(0, "waits"), start(1, "worker")]
    words = [*supervisor("ranks"), "kill", name, "1"]
    assert subprocess.run(words, timeout=60, check=False).returncode == 0
    assert children[1].wait(30) == -signal.SIGKILL and children[0].poll() is None
    assert subprocess.run([*words[:-1], "7"], timeout=60, check=False).returncode == 1


def test_other_attempts_are_not_asked(name: str, start: Start) -> None:
    start(0, "waits")
    assert stacks(f"{name}0") == stacks(name[:-1]) == ([], [])


def test_a_rank_that_has_closed_all_files_writes_into_none(name: str) -> None:
    code = (
        "import os\nfrom slurmddp.runtime.watch.own_stacks import OwnStacks\nown = OwnStacks()\n"
        "os.closerange(3, 100)\nown.look()\nfile = open('/dev/shm/x' + os.environ['NAME'], 'w+')\n"
        "while file.fileno() < own._memory: file = open(file.name, 'w+')\n"
        "os.remove(file.name)\nfile.write('mine'); file.flush(); own.look()\nfile.seek(0); print(file.read())"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NAME": name}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "mine\n"), done.stderr
