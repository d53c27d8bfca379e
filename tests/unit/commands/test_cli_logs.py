"""`slurmddp logs`: which lines, of which attempt, node and rank, and as they come."""

import json
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from slurmddp.commands import logs
from slurmddp.commands.logs import follow_logs, select
from slurmddp.run.layout import RunFolder
from slurmddp.run.logs import Follower
from slurmddp.run.state import RunState
from tests.helpers import Desk, Result, node_log

Cli = Callable[..., Result]


@pytest.fixture
def run(desk: Desk) -> RunFolder:
    """Two attempts on two nodes, two ranks a node."""
    folder = RunFolder(desk.project / "runs" / "gpt-1")
    for attempt in (0, 1):
        folder.attempt_logs(attempt).mkdir(parents=True)
        for node in (1, 2):
            first = 2 * node - 2
            text = f"a{attempt} start\n[rank{first}]: x\n[default{first + 1}]: y\na{attempt} end\n"
            node_log(folder, attempt, f"n{node}").write_text(text)
    folder.job_log.write_text("job\n")
    folder.ranks.write_text("n1\nn1\nn2\nn2\n")
    folder.manifest.write_text(json.dumps({"run": "gpt-1", "name": "gpt", "created": "2026-01-01T00:00:00+00:00"}))
    return folder


def test_attempts_are_labelled(run: RunFolder, cli: Cli) -> None:
    lines = cli("logs", str(run.path), "--tail", "1").out.splitlines()
    assert lines == [
        "job", "==> attempt 0 <==", "n1: a0 end", "n2: a0 end", "==> attempt 1 <==", "n1: a1 end", "n2: a1 end",
    ]  # fmt: skip
    assert cli("logs", str(run.path), "--attempt", "1", "--node", "n2").out.splitlines()[0] == "a1 start"


def test_a_json_object_per_line(run: RunFolder, cli: Cli) -> None:
    run.job_log.write_bytes(b"job \xff")
    told = [json.loads(line) for line in cli("logs", str(run.path), "--tail", "1", "--json").out.splitlines()]
    assert told[0] == {"attempt": None, "node": None, "line": "job \ufffd"}
    assert told[-1] == {"attempt": 1, "node": "n2", "line": "a1 end"} and len(told) == 5


def test_the_lines_of_a_rank(run: RunFolder, cli: Cli) -> None:
    done = cli("logs", str(run.path), "--attempt", "0", "--rank", "3")
    assert done.out.splitlines() == ["a0 start", "[default3]: y", "a0 end"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--attempt", "7"), "attempts: 0, 1"),
        (("--attempt", "7", "-f"), "attempts: 0, 1"),
        (("--node", "n9"), "nodes with a log: n1, n2"),
        (("--rank", "4"), "ranks: 0 to 3"),
        (("--rank", "3", "--node", "n1"), "rank 3 is on n2, not on n1"),
        (("-n", "0"), "--tail 0 shows no lines\n  -> add -f"),
    ],
)
def test_what_is_not_there_is_an_error_that_names_what_is(
    run: RunFolder, cli: Cli, options: tuple[str, ...], says: str
) -> None:
    done = cli("logs", str(run.path), *options)
    assert done.code == 2 and says in done.err and done.out == ""


def test_a_script_that_does_not_say_where_its_ranks_are(run: RunFolder, cli: Cli) -> None:
    run.ranks.unlink()
    done = cli("logs", str(run.path), "--rank", "0")
    assert done.code == 2 and "name the node: --node NAME" in done.err and "your own scripts do not" in done.err


@pytest.mark.parametrize("end", ["", "\n"])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 50_000, 60_000])
def test_the_last_lines_of_a_long_log(run: RunFolder, count: int, end: str) -> None:
    lines = [f"line {number}" for number in range(50_000)]
    run.job_log.write_text("\n".join(lines) + end)
    follower = Follower(run, attempt=9, tail=count)
    assert [line.decode() for line in follower.new_lines(to_the_end=True)] == (lines[-count:] if count else [])
    with run.job_log.open("a") as file:
        file.write("more\n")
    assert [line.decode() for line in follower.new_lines()] == ["more"]


@pytest.mark.parametrize("text", ["", "\n", "\n\n", "one"])
def test_the_last_lines_of_a_short_log(run: RunFolder, text: str) -> None:
    run.job_log.write_text(text)
    found = list(Follower(run, attempt=9, tail=5).new_lines(to_the_end=True))
    assert found == [line.encode() for line in text.split("\n")[: -1 if text.endswith("\n") or not text else None]]


def test_a_slow_scheduler_keeps_no_line_back_and_a_requeue_is_followed(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "ASK_EVERY", 0.0)
    answered = threading.Event()
    states = iter([RunState("requeued", "BeginTime"), RunState("running"), RunState("done")])

    def ask() -> Any:
        assert answered.wait(60)
        return SimpleNamespace(state=next(states), notes=())

    said: list[str] = []
    found = follow_logs(select(run, node="n1", follow=True), ask, said.append)
    lines: list[bytes] = []

    def write() -> None:
        with node_log(run, 1, "n1").open("a") as file:
            file.write("while Slurm does not answer\n")
        time.sleep(1)
        run.attempt_logs(2).mkdir()
        node_log(run, 2, "n1").write_text("next attempt\n")
        time.sleep(1)
        answered.set()

    writer = threading.Thread(target=write)
    writer.start()
    for line in found:
        lines.append(line)
        if b"while" in line:
            assert not answered.is_set()
    writer.join()
    wanted = [b"while Slurm does not answer", b"==> attempt 2 <==", b"next attempt"]
    assert lines[-3:] == wanted and said == ["requeued: BeginTime", "done"]


def test_an_error_of_asking_is_raised(run: RunFolder) -> None:
    def ask() -> Any:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        list(follow_logs(select(run, follow=True), ask, print))


def test_a_huge_line_comes_in_pieces_and_only_once(run: RunFolder) -> None:
    run.job_log.write_bytes(b"x" * (3 * 2**20 + 5))
    follower = Follower(run, attempt=9)
    assert [len(line) for line in follower.new_lines()] == [2**20] * 3
    with run.job_log.open("ab") as file:
        file.write(b"\n")
    assert list(follower.new_lines()) == [b"xxxxx"]
