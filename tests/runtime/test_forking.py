"""Forked ranks cannot tell that they are: each test compares with what a fresh process says of itself."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from slurmddp.records.rank_events import NotForked
from slurmddp.runtime.agent import forking
from slurmddp.supervisor import ranks, sweep

from .harness import HERE, PATIENCE, ROOT

PYTHON = [sys.executable, "-u"]
WORDS = ["eager", "7"]


class Done(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def said(self) -> Any:
        return json.loads(self.out.splitlines()[-1])


@contextlib.contextmanager
def environment(folder: Path, **more: str) -> Iterator[None]:
    """The agent's: what node.sh gives it."""
    (folder / "site").mkdir(exist_ok=True)
    (folder / "site" / "sitecustomize.py").write_text("import os\nSEEN = os.environ['ROLE_NAME'], 'torch' in dir()\n")
    path = os.pathsep.join([str(ROOT), str(folder / "site")])
    before, cwd = dict(os.environ), Path.cwd()
    known = {"PATH", "HOME", "LANG", "LC_ALL", "VIRTUAL_ENV", "LD_LIBRARY_PATH"}
    try:
        os.environ.clear()
        os.environ.update({name: value for name, value in before.items() if name in known})
        os.environ.update(PYTHONPATH=path, OMP_NUM_THREADS="2", TORCHELASTIC_RUN_ID="x", **more)
        os.chdir(folder)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        os.chdir(cwd)


def of_rank(role: str) -> dict[str, str]:
    agent = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    return {**agent, "ROLE_NAME": role, "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}


class Pair:
    """One program, and both ways to start it."""

    def __init__(self, folder: Path, words: list[str]) -> None:
        self.folder, self.words = folder, words
        self.template = forking.Template(PYTHON, words)

    def command(self) -> list[str]:
        return [*PYTHON, "-m", "slurmddp.runtime.begin", *self.words]

    def fork(self, role: str, out: Any, err: Any) -> forking.ForkedRank:
        return self.template.fork(self.command(), of_rank(role), [out.fileno(), err.fileno()])

    def start(self, role: str, out: Any, err: Any) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(self.command(), env=of_rank(role), stdout=out, stderr=err, start_new_session=True)

    def run(self, how: str, role: str) -> Done:
        names = [self.folder / f"{role}-{how}.{end}" for end in ("out", "err")]
        with names[0].open("w") as out, names[1].open("w") as err:
            process = self.fork(role, out, err) if how == "fork" else self.start(role, out, err)
        code = process.wait(PATIENCE)
        return Done(code, *(name.read_text() for name in names))

    def both(self, role: str) -> tuple[Done, Done]:
        return self.run("fork", role), self.run("start", role)


#: Ends of a process that `make test-full` tries, too.
LESS_OFTEN = ("text", "usage", "interrupt", "15", "11", "6")


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("probe")
    with environment(folder, PYTHONHASHSEED="5"):
        pair = Pair(folder, [str(HERE / "forked_probe.py"), *WORDS])
        yield pair
        pair.template.close()


def test_process_is_the_same(probe: Pair) -> None:
    forked, fresh = probe.both("state")
    assert (forked.code, forked.err) == (0, "") and fresh.code == 0
    for name, value in fresh.said.items():
        assert forked.said[name] == value, name
    assert forked.said["parent"] == os.getpid() and forked.said["sitecustomize"][0] == "state"


def test_torch_is_the_same(probe: Pair) -> None:
    for role in ("torch", "devices"):
        forked, fresh = probe.both(role)
        assert forked.code == 0 and forked.said == fresh.said, forked.err


def test_script_that_sets_threads_before_torch_starts_fresh(probe: Pair) -> None:
    forked, fresh = probe.both("threads")
    assert forked.said == fresh.said and forked.said["threads"][0] == 1
    assert (forked.out.count("a line above"), fresh.out.count("a line above")) == (2, 1)  # the documented price


def test_random_numbers_differ_unless_seeded(probe: Pair) -> None:
    one, two, fresh = probe.run("fork", "draws"), probe.run("fork", "draws"), probe.run("start", "draws")
    assert one.said["seeded"] == two.said["seeded"] == fresh.said["seeded"]
    for name, value in one.said["free"].items():
        assert value not in (two.said["free"][name], fresh.said["free"][name]), name


def test_pickles_pools_and_data_workers(probe: Pair) -> None:
    forked, fresh = probe.both("processes")
    assert forked.code == 0, forked.err
    assert forked.said == fresh.said and forked.said["pickle"]
    assert forked.said["spawn"] == [[2, "__mp_main__"], [4, "__mp_main__"]]


def test_losses_are_the_same_and_the_first_step_imports_nothing_of_torch(probe: Pair) -> None:
    forked, fresh = probe.both("training")
    assert forked.said["losses"] == fresh.said["losses"], forked.err
    assert (forked.said["late"], bool(fresh.said["late"])) == ([], True)


@pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="this machine has no NVIDIA GPU")
def test_losses_on_a_gpu_are_the_same(probe: Pair) -> None:
    forked, fresh = probe.both("on_gpu")
    assert forked.code == 0, forked.err
    assert forked.said == fresh.said and forked.said["before"] == [False, False]


def test_torch_compile(probe: Pair) -> None:
    forked, fresh = probe.both("compiled")
    assert forked.said == fresh.said and forked.said["compiled"] == [1.0, 5.0], forked.err


@pytest.mark.parametrize(
    "role",
    ["exit", "error", "9", *(pytest.param(role, marks=pytest.mark.long) for role in LESS_OFTEN)],
)
def test_exit_is_the_same(probe: Pair, role: str) -> None:
    forked, fresh = probe.both(role)
    assert forked == fresh
    assert forked.code != 0


def test_signals_process_group_and_what_others_see(probe: Pair) -> None:
    with (probe.folder / "wait.out").open("w") as out:
        rank = probe.fork("wait", out, out)
        with pytest.raises(subprocess.TimeoutExpired):
            rank.wait(0.05)
        until_text(probe.folder / "wait.out", "waits")
        assert rank.poll() is None and os.getsid(rank.pid) == rank.pid
        assert ranks.environment(rank.pid) == {**of_rank("wait"), "PYTHONPATH": hooked()}
        assert sweep.processes()[rank.pid].parent == os.getpid()
        os.killpg(rank.pid, signal.SIGTERM)
        assert rank.wait(PATIENCE) == -signal.SIGTERM == rank.poll() == rank.returncode
        rank.kill()  # of a process that is gone: nothing


def hooked() -> str:
    return os.pathsep.join([str(ROOT / "slurmddp/runtime/hooks"), os.environ["PYTHONPATH"]])


def until_text(path: Path, text: str) -> None:
    end = time.monotonic() + PATIENCE
    while text not in path.read_text():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_other_variables_or_command_start_fresh(probe: Pair) -> None:
    with pytest.raises(forking.NotPossible, match="MKL_NUM_THREADS changed since the agent began"):
        probe.template.fork(probe.command(), {**of_rank("state"), "MKL_NUM_THREADS": "2"}, [1, 2])
    with pytest.raises(forking.NotPossible, match="another command"):
        probe.template.fork(["numactl", *probe.command()], of_rank("state"), [1, 2])


def test_template_outlives_signals_of_the_step_and_its_death_is_told(tmp_path: Path) -> None:
    with environment(tmp_path):
        pair = Pair(tmp_path, [str(HERE / "forked_probe.py"), *WORDS])
        assert pair.run("fork", "exit").code == 7
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
            os.kill(pair.template._process.pid, number)
        assert pair.run("fork", "exit").code == 7
        assert pair.run("fork", "15").code == -15  # nothing of what the template got
        pair.template._process.kill()
        pair.template._process.wait()
        with pytest.raises(forking.NotPossible, match=re.escape("has ended (exit code -9)")):
            pair.run("fork", "exit")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
            "threads run once",
        ),
        ("raise ImportError('is broken')", "torch cannot be imported: ImportError: is broken"),
    ],
)
def test_template_that_cannot_be_forked_says_why(tmp_path: Path, text: str, why: str) -> None:
    with environment(tmp_path):
        prelude = tmp_path / "prelude"
        prelude.mkdir()
        (prelude / "torch.py").write_text(text)
        os.environ["PYTHONPATH"] = f"{prelude}{os.pathsep}{os.environ['PYTHONPATH']}"
        pair = Pair(tmp_path, [str(HERE / "forked_probe.py"), *WORDS])
        with pytest.raises(forking.NotPossible, match=why):
            pair.run("fork", "exit")
        pair.template.close()


def test_module_and_arguments_with_which_it_resumes(tmp_path: Path) -> None:
    shutil.copy(HERE / "forked_probe.py", tmp_path / "named.py")
    resume = json.dumps({"watch": [], "args": ["--load", "{checkpoint}"]})
    with environment(tmp_path, PYTHONHASHSEED="5", SLURMDDP_RESUME=resume, SLURMDDP_CHECKPOINT="/a save"):
        os.environ["PYTHONPATH"] += f"{os.pathsep}{tmp_path}"
        pair = Pair(tmp_path, ["-m", "named", *WORDS])
        forked, fresh = pair.both("state")
        pair.template.close()
    assert forked.said == fresh.said, forked.err
    assert forked.said["argv"][-2:] == ["--load", "/a save"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["-m", "slurmddp.runtime.train", "run"], "bundled"),
        (["-m", "slurmddp.runtime.wrap", "1", "nsys", "-m", "slurmddp.runtime.begin", "a.py"], "launch.wrap"),
        (["-m", "slurmddp.runtime.begin", "bash", "a.sh"], "bash"),
    ],
)
def test_what_is_never_forked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], why: str) -> None:
    told: list[NotForked] = []
    monkeypatch.setenv(forking.WANTED, "1")
    assert forking.template(words, tmp_path / "events.jsonl", told.append) is None
    assert len(told) == 1 and why in told[0].why
    monkeypatch.delenv(forking.WANTED)
    assert forking.template(words, tmp_path / "events.jsonl", told.append) is None
    assert len(told) == 1


def test_the_agent_starts_its_template_before_it_imports_torch() -> None:
    """Both imports take as long as one, where there are two cores."""
    done = subprocess.run(
        [sys.executable, "-c", "import sys, slurmddp.runtime.agent.__main__; print('torch' in sys.modules)"],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "False\n"


TRAIN = """\
import os, sys, time
if "late" in sys.argv:
    os.environ["TORCH_MINE"] = "1"
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters())
start = int(os.environ["SLURMDDP_START"])
for step in range(3 if start == 2 else 10000):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    if step == 1:
        rank = dist.get_rank()
        with open(f"told-{start}-{rank}.part", "w") as file:
            file.write(f"{os.getpid()} {hash('signature of one template')} {time.time()}")
        os.rename(file.name, f"told-{start}-{rank}")
    time.sleep(0.01)
"""


def rank_told(root: Path, agent: "subprocess.Popen[bytes]", start: int, rank: int) -> list[str]:
    path, end = root / f"told-{start}-{rank}", time.monotonic() + PATIENCE
    while not path.exists():
        assert agent.poll() is None or path.exists(), (root / "log").read_text()
        assert time.monotonic() < end
        time.sleep(0.02)
    return path.read_text().split()


def wait_for_first_steps(root: Path, number: int) -> None:
    """The observer looks a few times per second."""
    end = time.monotonic() + PATIENCE
    while (root / "events.jsonl").read_text().count('"first_step"') < number:
        assert time.monotonic() < end
        time.sleep(0.02)


@contextlib.contextmanager
def agent_of(tmp_path: Path, word: str) -> "Iterator[subprocess.Popen[bytes]]":
    """slurmddp's torchrun with two ranks of TRAIN."""
    (tmp_path / "train.py").write_text(TRAIN)
    key = tmp_path / "rendezvous.key"
    key.touch(0o600)
    key.write_bytes(os.urandom(64))
    with environment(tmp_path, SLURMDDP_FORK="1", SLURMDDP_ATTEMPT="0", SLURMDDP_NODE="here", SLURMDDP_OBSERVE="{}"):
        os.environ.update(SLURMDDP_RUN=str(tmp_path), SLURMDDP_RENDEZVOUS_ID=str(tmp_path))
        command = [sys.executable, "-m", "slurmddp.runtime.agent", str(tmp_path), "--nnodes=1", "--nproc-per-node=2"]
        command += ["--max-restarts=5", "--rdzv-backend=slurmddp-c10d", "--rdzv-endpoint=localhost:0"]
        command += [f"--rdzv-id={tmp_path}", "--rdzv-conf=is_host=1", "-m", "slurmddp.runtime.begin", "train.py", word]
        with (tmp_path / "log").open("w") as log:
            agent = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield agent
    finally:
        agent.kill()
        agent.wait()


@pytest.mark.ranks(2)
def test_ranks_and_template_end_with_a_killed_agent(tmp_path: Path) -> None:
    with agent_of(tmp_path, "agent") as agent:
        pids = [int(rank_told(tmp_path, agent, 0, rank)[0]) for rank in range(2)] + [template_of(agent.pid)]
        assert all(sweep.processes()[pid].mine for pid in pids)
        agent.kill()
        end = time.monotonic() + PATIENCE
        while any(pid in (found := sweep.processes()) and found[pid].mine for pid in pids):
            assert time.monotonic() < end
            time.sleep(0.05)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "fault", ["rank", *(pytest.param(fault, marks=pytest.mark.long) for fault in ("template", "late"))]
)
def test_agent_forks_ranks_again_and_starts_them_where_it_cannot(tmp_path: Path, fault: str) -> None:
    """A rank is killed in start 0 and in start 1. Ranks that share a random hash seed come from one template."""
    signatures = []
    with agent_of(tmp_path, fault) as agent:
        for start in range(3):
            told = [rank_told(tmp_path, agent, start, rank) for rank in range(2)]
            signatures += [words[1] for words in told]
            if start == 0:
                assert [rank.number for rank in ranks.ranks_of(str(tmp_path))] == [0, 1]
                assert {str(rank.pid) for rank in ranks.ranks_of(str(tmp_path))} == {words[0] for words in told}
            if start == 1 and fault == "template":
                os.kill(template_of(agent.pid), signal.SIGKILL)
            if start < 2:
                wait_for_first_steps(tmp_path, start + 1)
                os.kill(int(told[start][0]), signal.SIGKILL)
        assert agent.wait(PATIENCE) == 0, (tmp_path / "log").read_text()
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    why = [event["why"] for event in events if event["event"] == "not_forked"]
    assert [event["signal"] for event in events if event["event"] == "rank_exited"] == ["SIGKILL"] * 2
    assert len([event for event in events if event["event"] == "first_step"]) == 3
    expected = {"rank": 1, "template": 3, "late": 6}  # fresh ranks have hash seeds of their own
    assert len(set(signatures)) == expected[fault], (signatures, why)
    assert (
        why
        == {
            "rank": [],
            "template": ["the process that has imported torch has ended (exit code -9)"],
            "late": ["the script sets TORCH_MINE before it imports torch"],
        }[fault]
    )


def template_of(agent: int) -> int:
    children = [pid for pid, process in sweep.processes().items() if process.parent == agent]
    return next(pid for pid in children if "RANK" not in ranks.environment(pid))
