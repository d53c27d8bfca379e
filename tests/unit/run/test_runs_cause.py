"""What `slurmddp status` says of a run that failed."""

import json
from pathlib import Path

import pytest

from slurmddp.records.preflight import Verdict, bad
from slurmddp.records.refusal import Refusal
from slurmddp.run import cause as module
from slurmddp.run.layout import RunFolder
from tests.helpers import append_event, node_log


def find_cause(folder: RunFolder, attempt: int) -> str | None:
    """The cause as `status` shows it."""
    found = module.find_cause(folder, attempt)
    return found and found.line_with_log()


TORCHRUN = """\
[rank3]: Traceback (most recent call last):
[rank3]:   File "/run/code/project/train.py", line 3, in <module>
[rank3]: ValueError: boom
W1120 14:37:31 torch/distributed/elastic: Sending process 7 closing signal SIGTERM
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    logs = tmp_path / "logs" / "attempt-000"
    logs.mkdir(parents=True)
    (logs / "node1.log").write_text(
        "slurmddp: node rank 0 of 2: host node1, address 10.0.0.1, head node1:61000\nstep 1\n"
    )
    (logs / "node2.log").write_text("nothing yet\n")
    return RunFolder(tmp_path)


def test_the_first_exception_of_a_rank(folder: RunFolder) -> None:
    node_log(folder, 0, "node2").write_text(TORCHRUN)
    assert find_cause(folder, 0) == f"rank 3 on node2: ValueError: boom (in {node_log(folder, 0, 'node2')})"


def test_a_lost_connection_is_what_the_others_see(folder: RunFolder) -> None:
    lost = "[rank0]: RuntimeError: [pair.cc:553] Connection closed by peer [10.0.0.2]:5\n"
    node_log(folder, 0, "node1").write_text(lost)
    alone = find_cause(folder, 0)
    assert alone is not None and alone.startswith("rank 0 on node1: RuntimeError")
    node_log(folder, 0, "node2").write_text(TORCHRUN)
    assert find_cause(folder, 0) == f"rank 3 on node2: ValueError: boom (in {node_log(folder, 0, 'node2')})"


KILLED = """\
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
======================================================
train.py FAILED
------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-21_20:30:42
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 8183)
  error_file: <N/A>
------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_20:30:42
  host      : localhost
  rank      : 5 (local_rank: 1)
  exitcode  : {code} (pid: 8184)  ({name})
  error_file: <N/A>
======================================================
"""
LOST = {
    "event": "error", "attempt": 0, "rank": 0, "node": "node1", "kind": "RuntimeError",
    "message": "[pair.cc:553] broken\n Connection reset by peer\nGLHF!",
}  # fmt: skip


def test_a_rank_that_was_killed_is_told_by_torchrun_alone(folder: RunFolder) -> None:
    folder.events.write_text(json.dumps(LOST) + "\n")
    log = node_log(folder, 0, "node2")
    log.write_text(KILLED.format(code=-9, name="SIGKILL"))
    assert find_cause(folder, 0) == f"rank 5 on node2: killed by SIGKILL (out of memory?) (in {log})"
    log.write_text(KILLED.format(code=-11, name="SIGSEGV"))
    assert find_cause(folder, 0) == f"rank 5 on node2: killed by SIGSEGV (in {log})"
    log.write_text(TORCHRUN + KILLED.format(code=-9, name="SIGKILL"))
    assert find_cause(folder, 0) == f"rank 3 on node2: ValueError: boom (in {log})"


@pytest.mark.parametrize(("code", "name"), [(-15, "SIGTERM"), (-6, "SIGABRT"), (1, "?"), (-99, "?")])
def test_a_rank_that_ended_because_of_another_is_no_cause(folder: RunFolder, code: int, name: str) -> None:
    folder.events.write_text(json.dumps(LOST) + "\n")
    node_log(folder, 0, "node2").write_text(KILLED.format(code=code, name=name))
    assert find_cause(folder, 0) == "rank 0 on node1: RuntimeError: [pair.cc:553] broken (more in events.jsonl)"


def test_a_script_that_never_joined(folder: RunFolder) -> None:
    node_log(folder, 0, "node1").write_text(
        "Traceback (most recent call last):\nModuleNotFoundError: No module named 'x'\n"
    )
    cause = find_cause(folder, 0)
    assert cause is not None and cause.startswith("node1: ModuleNotFoundError: No module named 'x' (in ")


def test_what_node_sh_found(folder: RunFolder) -> None:
    node_log(folder, 0, "node2").write_text("slurmddp: node node2: setup line failed with exit code 1: module load x\n")
    cause = find_cause(folder, 0)
    assert cause is not None and cause.startswith("node2: setup line failed with exit code 1: module load x")


def test_the_event_of_the_bundled_entrypoint_comes_first(folder: RunFolder) -> None:
    node_log(folder, 0, "node2").write_text(TORCHRUN)
    event = {"event": "error", "attempt": 0, "rank": 1, "node": "node1", "kind": "UserError", "message": "no data"}
    folder.events.write_text(json.dumps(event) + "\n")
    assert find_cause(folder, 0) == "rank 1 on node1: UserError: no data"
    assert find_cause(folder, 1) is None


def test_a_hang_names_who_was_waited_for(folder: RunFolder) -> None:
    lost = {"event": "error", "attempt": 0, "rank": 0, "node": "node1", "kind": "RuntimeError", "message": "boom"}
    hang = {"event": "hang", "attempt": 0, "ranks": [3], "nodes": ["node2"], "phase": "step", "step": 7, "waited": 9.5}
    folder.events.write_text("".join(json.dumps(event) + "\n" for event in (hang, lost)))
    assert find_cause(folder, 0) == "rank 3 on node2: hang: no progress in step at step 7 for 9.5 s"
    folder.events.write_text(json.dumps({**hang, "ranks": [], "nodes": []}) + "\n")
    assert find_cause(folder, 0) == "no rank is behind the others: hang: no progress in step at step 7 for 9.5 s"


def test_a_hang_that_nobody_stopped_is_the_cause_of_what_came_of_it(folder: RunFolder) -> None:
    told = {"attempt": 0, "ranks": [3], "nodes": ["node2"], "phase": "step", "step": 7, "waited": 9.5}
    hang, over = {"event": "hang_reported", **told}, {"event": "hang_over", "attempt": 0}
    lost = {"event": "error", "attempt": 0, "rank": 0, "node": "node1", "kind": "RuntimeError", "message": "boom"}
    folder.events.write_text("".join(json.dumps(event) + "\n" for event in (hang, lost)))
    assert find_cause(folder, 0) == "rank 3 on node2: hang: no progress in step at step 7 for 9.5 s"
    folder.events.write_text("".join(json.dumps(event) + "\n" for event in (over, hang, over, lost)))
    assert find_cause(folder, 0) == "rank 0 on node1: RuntimeError: boom"


def test_what_ended_the_newest_start_of_the_ranks_counts(folder: RunFolder) -> None:
    """torchrun started them again after the first failure: that one did not end the job."""
    start = {"event": "rank_started", "attempt": 0, "rank": 0, "node": "node1"}
    first = {"event": "error", "attempt": 0, "rank": 1, "node": "node1", "kind": "ValueError", "message": "first"}
    second = {**first, "rank": 2, "message": "second"}
    folder.events.write_text("".join(json.dumps(event) + "\n" for event in (start, first, start, second)))
    assert find_cause(folder, 0) == "rank 2 on node1: ValueError: second"


def attempt_ended(**facts: object) -> str:
    return json.dumps({"event": "attempt_ended", "attempt": 0, "node": "node1", **facts}) + "\n"


def test_what_the_script_found_out_goes_first(folder: RunFolder) -> None:
    node_log(folder, 0, "node2").write_text(TORCHRUN)
    folder.events.write_text(attempt_ended(cause="killed by SIGKILL", rank=3, node="node2"))
    assert find_cause(folder, 0) == "rank 3 on node2: killed by SIGKILL"
    folder.events.write_text(attempt_ended(cause="boom", rank=3, node=""))
    assert find_cause(folder, 0) == "rank 3: boom"
    folder.events.write_text(attempt_ended(cause="lost by Slurm", rank=None, node="node3"))
    assert find_cause(folder, 0) == "node3: lost by Slurm"
    folder.events.write_text(attempt_ended(cause="too few nodes are left: node1", rank=None, node=""))
    assert find_cause(folder, 0) == "too few nodes are left: node1"
    folder.events.write_text(attempt_ended(cause="unknown user", rank=None, node=""))
    assert find_cause(folder, 0) == "unknown user"
    for unknown in ("", "unknown", "unknown; no progress in 3 starts"):
        folder.events.write_text(attempt_ended(cause=unknown, rank=None, node="", kind="not found"))
        assert find_cause(folder, 0) == f"rank 3 on node2: ValueError: boom (in {node_log(folder, 0, 'node2')})"


def test_nodes_that_failed_the_check(folder: RunFolder) -> None:
    place = folder.attempt_logs(0) / "preflight"
    place.mkdir()
    verdict, good = place / "verdict.json", Verdict({"node1": (), "node2": ()})
    broken = (bad("has 3 of 4 GPUs", "leave it out: --exclude=node2"),)
    verdict.write_text(json.dumps(Verdict({"node1": (), "node2": broken}).write()))
    assert find_cause(folder, 0) == "node2: has 3 of 4 GPUs - leave it out: --exclude=node2"
    verdict.write_text(json.dumps(good.write()))
    assert find_cause(folder, 0) is None
    verdict.unlink()
    (place / "node3.failed").write_text(Refusal("cannot reach node1:61000").write())
    (place / "node4.failed").write_text(Refusal("cannot reach node1:61000").write())
    assert find_cause(folder, 0) == f"node3: cannot reach node1:61000 (and 1 more: {place})"
    excluded = {"event": "node_excluded", "attempt": 0, "excluded": "node2", "reason": "preflight: it did not answer"}
    folder.events.write_text(json.dumps(excluded) + "\n")
    assert find_cause(folder, 0) == f"node3: cannot reach node1:61000 (and 2 more: {place})"
    for path in place.iterdir():
        path.unlink()
    assert find_cause(folder, 0) == "node2: preflight: it did not answer"
    assert find_cause(folder, 1) is None
    told = attempt_ended(cause="too few nodes: node3 and node4 failed", node="")
    folder.events.write_text(json.dumps(excluded) + "\n" + told)
    assert find_cause(folder, 0) == "too few nodes: node3 and node4 failed"


def test_nobody_said_anything(folder: RunFolder) -> None:
    assert find_cause(folder, 0) is None


def test_the_signal_that_killed_a_rank_of_an_own_script(folder: RunFolder) -> None:
    """Its agent saw it. Signals of a cleanup, and exit codes, are no cause if the log has one."""

    def exited(rank: int, node: str, **how: object) -> None:
        append_event(folder.events, "rank_exited", attempt=0, rank=rank, node=node, **{"signal": None, **how})

    exited(0, "node1", exit_code=1)
    assert find_cause(folder, 0) == "rank 0 on node1: exited with code 1"
    exited(3, "node2", exit_code=None, signal="SIGKILL")
    exited(2, "node2", exit_code=None, signal="SIGTERM")
    assert find_cause(folder, 0) == "rank 3 on node2: killed by SIGKILL (out of memory?)"
    append_event(folder.events, "rank_started", attempt=0, rank=0, node="node1")
    exited(1, "node1", exit_code=None, signal="SIGSEGV")
    assert find_cause(folder, 0) == "rank 1 on node1: killed by SIGSEGV", "of the newest start"
    append_event(folder.events, "rank_started", attempt=0, rank=0, node="node1")
    exited(3, "node2", exit_code=1)
    node_log(folder, 0, "node2").write_text(TORCHRUN)
    assert find_cause(folder, 0) == f"rank 3 on node2: ValueError: boom (in {node_log(folder, 0, 'node2')})"


@pytest.mark.parametrize(
    ("job", "cause"),
    [
        ("launch: {mode: srun}\n", "rank 2 on node2: srun's task: Killed"),
        ("launch: {mode: torchrun}\n", "node2: the torchrun agent: Killed"),
    ],
)
def test_a_task_of_srun_is_a_rank_where_srun_starts_the_ranks(folder: RunFolder, job: str, cause: str) -> None:
    folder.job_yaml.write_text(job)
    (folder.attempt_logs(0) / "srun.err").write_text("srun: error: node2: task 2: Killed\n")
    assert str(find_cause(folder, 0)).startswith(cause)
