"""What the supervisor asks the causes. These tests run under Python 3.6, too, with pytest and nothing else."""

import os
import time
from pathlib import Path
from typing import Any, Callable, Optional, Sequence

import pytest

from slurmddp.causes import events
from slurmddp.causes.find import find, node_logs
from slurmddp.causes.rules import is_consequence, kind_of, rules
from slurmddp.records.cause import AGENT, CONSEQUENCE, EXCEPTION, EXIT, HANG, SIGNAL, UNKNOWN, USER, Cause, read

#: Writes logs, and returns what `find` says of them.
Judge = Callable[..., Any]
BOOM = "[rank3]: ValueError: boom\n"
LOST = "[rank0]: RuntimeError: Connection closed by peer [10.0.0.2]:5\n"
START = "E1122 20:00:00.000000 1 api.py:1] failed (exitcode: {}) local_rank: 1 (pid: 7) of binary: python\n"


@pytest.fixture
def logs(tmp_path: Path) -> Judge:
    def judge(noted: Optional[Cause] = None, nodes: Sequence[str] = (), **texts: str) -> Optional[Cause]:
        for name, text in texts.items():
            (tmp_path / (name.replace("srun_err", "srun.err") + ("" if name == "srun_err" else ".log"))).write_text(
                text
            )
        return find(node_logs(str(tmp_path)), str(tmp_path / "srun.err"), nodes, noted)

    return judge


def test_a_cause_has_its_facts_as_fields(logs: Judge, tmp_path: Path) -> None:
    found = logs(node1=LOST, node2=BOOM)
    assert found == Cause("ValueError: boom", 3, "node2", EXCEPTION, None, str(tmp_path / "node2.log"))
    assert found.line() == "rank 3 on node2: ValueError: boom"
    assert logs(node2="slurmddp: node node2: setup line failed with exit code 3: x\n").kind == USER


def test_what_was_noted_counts_unless_it_may_follow_from_another_failure(logs: Judge) -> None:
    hang = events.hung([1], ["node1"], "no progress for 9 s")
    assert logs(hang, node2=BOOM) is hang
    lost = events.raised(0, "node1", "RuntimeError", "Connection reset by peer")
    assert logs(lost, node2=BOOM).text == "ValueError: boom"
    assert logs(lost, node2=LOST) is lost
    assert logs(events.exited(1, "node1", None, 1), node2=START.format(1)).kind == EXIT
    assert logs(None, node2="step 1\n") is None


def test_a_printed_exception_is_no_cause_where_a_signal_killed_a_rank(logs: Judge) -> None:
    """A script that retries prints it, and goes on."""
    retried = "ConnectionError: S3 read failed, retrying\n"
    found = logs(None, ["node2", "node2"], node2=retried + START.format(-9))
    assert (found.text, found.rank, found.kind) == ("killed by SIGKILL (out of memory?)", 1, SIGNAL)
    assert logs(node2=retried, srun_err="srun: error: node2: task 1: Killed\n").kind == AGENT
    assert logs(node2=retried, srun_err="").text == retried.strip()


def test_a_signal_of_an_earlier_start_is_no_cause_where_a_rank_of_the_newest_exited(logs: Judge) -> None:
    """The script prints what it caught, and exits: no rank of this start was killed."""
    lines = START.format(-9) + "ValueError: cannot load\n" + START.format(1)
    exited = events.exited(1, "node2", None, 1)
    assert logs(None, node2=lines).kind == SIGNAL, "without events, nobody knows which start a line is of"
    assert logs(exited, node2=lines).text == "ValueError: cannot load"
    assert logs(exited, ["node2", "node2"], node2=START.format(-9) + START.format(1)).kind == EXIT


def test_tasks_that_srun_ended_after_one_that_failed_are_no_cause(logs: Judge) -> None:
    ended = "srun: error: node1: task 0: Exited with exit code 1\nsrun: error: node2: task 1: Killed\n"
    assert logs(node1="ImportError: no x\n", srun_err=ended).text == "ImportError: no x"
    assert logs(node1="", srun_err=ended) is None
    assert (
        logs(srun_err="srun: error: node2: task 1: Out Of Memory\n" + ended).text == "the torchrun agent: Out Of Memory"
    )


def test_texts_are_plain(logs: Judge) -> None:
    assert (
        logs(node1="[rank0]: ValueError: \x1b[31mred\x00\u202e\x9b" + "x" * 900).text == "ValueError: red" + "x" * 380
    )
    assert logs(node1="", srun_err="srun: error: no\x1bde: task 1: Killed\n").node == "node"
    assert events.raised(0, "n", "OSError", "\x07a\udc80b \nmore").text == "OSError: ab"


def test_a_cause_has_no_secret_that_its_log_or_event_has(logs: Judge) -> None:
    text = "ValueError: bad HF_TOKEN='correcthorse' for https://me:planted@host/x"
    safe = "ValueError: bad HF_TOKEN=[redacted] for https://[redacted]@host/x"
    assert logs(node1="[rank3]: " + text + "\n").text == safe
    assert events.raised(3, "node1", *text.split(": ", 1)).text == safe


def test_kinds_of_texts() -> None:
    assert is_consequence("RuntimeError: Broken pipe") and not is_consequence("ValueError: boom")
    assert kind_of("setup line failed with exit code 1: x", "") == USER and kind_of("cannot bind /x", "") == ""


def test_causes_of_events() -> None:
    assert events.raised(0, "n", "ValueError", "a\nBroken pipe", 3.5) == Cause(
        "ValueError: a", 0, "n", CONSEQUENCE, 3.5
    )
    assert events.killed(0, "n", "SIGKILL") == Cause("killed by SIGKILL (out of memory?)", 0, "n", SIGNAL)
    assert events.killed(0, "n", "SIGRTMIN").text == "killed by SIGRTMIN"
    assert events.killed(0, "n", "SIGTERM") is None and events.killed(0, "n", None) is None
    assert events.exited(0, "n", "SIGTERM", None) == Cause("ended by SIGTERM", 0, "n", EXIT)
    assert events.exited(0, "n", None, 2).text == "exited with code 2"
    assert events.hung([3, 4], ["a", "b"], "no progress") == Cause("hang: no progress (and 1 more)", 3, "a", HANG)
    assert events.hung([], [], "x").line() == "no rank is behind the others: hang: x"


@pytest.mark.parametrize("cause", [Cause("boom"), Cause("boom", 0, "node1", EXCEPTION, 1.5, "/run/log")])
def test_a_cause_is_read_as_it_was_written(cause: Cause) -> None:
    assert read(cause.write()) == cause


def test_what_is_not_sound_is_unknown() -> None:
    told = {"text": " boom ", "rank": "3", "node": None, "time": True, "kind": None}
    assert read(told) == Cause("boom", None, "", UNKNOWN, None)
    assert read({"rank": 3}) is None


def test_logs_that_cannot_be_read_are_skipped(logs: Judge, tmp_path: Path) -> None:
    os.mkfifo(str(tmp_path / "node0.log"))
    (tmp_path / "node1.log").mkdir()
    assert logs(node2=BOOM).rank == 3


def test_reading_is_bounded(logs: Judge, tmp_path: Path) -> None:
    logs(node1=BOOM + "x" * 79 + "\n" * 2000000)
    assert logs() is None, "only the end of a log is read"
    paths = [str(tmp_path / "node2.log")]
    (tmp_path / "node2.log").write_text(BOOM)
    assert find(paths, seconds=-1) is None
    assert find(paths).rank == 3


def test_4096_nodes_are_judged_within_a_second(tmp_path: Path) -> None:
    for node in range(4096):
        (tmp_path / f"node{node:04}.log").write_text("step 1\n" * 20 + LOST)
    rules()
    began = time.process_time()
    found = find(node_logs(str(tmp_path)), None, [f"node{node:04}" for node in range(4096)])
    assert found.node == "node0000" and time.process_time() - began < 1


def test_a_hang_names_the_first_of_the_ranks_that_the_others_wait_for() -> None:
    text = "no step for 60 s"
    one, two = events.hung([3], ["n2"], text, 5.0), events.hung([3, 4], ["n2", "n2"], text)
    assert (one.text, one.rank, one.node, one.time) == (f"hang: {text}", 3, "n2", 5.0)
    assert two.text == f"hang: {text} (and 1 more)"
    for ranks, nodes in (([], []), ([3], []), ([], ["n2"])):
        assert events.hung(ranks, nodes, text)[1:3] == (None, "")
    assert events.hung([], [], text).text == f"no rank is behind the others: hang: {text}"
