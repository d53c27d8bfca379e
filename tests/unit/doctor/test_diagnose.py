"""The root cause is told from what followed. Logs in the manner of real ones, in our own words."""

import io
import json
import re
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from slurmddp.commands.doctor import lines
from slurmddp.doctor.diagnose import Diagnosis, Examination
from slurmddp.doctor.lines import Budget
from slurmddp.doctor.rules import catalogue
from slurmddp.doctor.sources import is_done, read_run, survived_failures
from slurmddp.doctor.tracebacks import Tracebacks
from slurmddp.errors import UserError
from slurmddp.records.refusal import Refusal
from slurmddp.run.cause import failing_attempt
from slurmddp.run.layout import RunFolder
from tests.helpers import node_log
from tests.unit.doctor.runs import diagnose_run

BOOM = """\
[rank{rank}]: Traceback (most recent call last):
[rank{rank}]:   File "/home/u/train.py", line 12, in <module>
[rank{rank}]:     main()
[rank{rank}]:   File "/home/u/model.py", line 7, in main
[rank{rank}]:     raise ValueError("No space left on device")
[rank{rank}]: ValueError: boom
"""
WATCHDOG = (
    "[rank{rank}]:[E1119 13:2{rank}:12.5 ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600001 ms\n"
)
TORCHRUN = """\
W1 api.py:1] Sending process 7 closing signal SIGTERM
E1 api.py:2] failed (exitcode: 1) local_rank: 1 (pid: 8) of binary: python
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_20:30:42
  host      : node7
  rank      : 3 (local_rank: 1)
  exitcode  : {code} (pid: 8)
"""
LIMIT = "slurmstepd: error: *** JOB 5 ON n1 CANCELLED AT 2026-11-21T20:30:42 DUE TO TIME LIMIT ***\n"
TRITON = """\
Traceback (most recent call last):
  File "/opt/env/lib/python3.11/site-packages/triton/compiler/compiler.py", line 202, in compile
    return CompiledKernel(src)
  File "/opt/env/lib/python3.11/pathlib.py", line 1134, in read_text
    with self.open() as f:
OSError: [Errno 116] Stale file handle
"""
SEMAPHORE = """\
Traceback (most recent call last):
  File "/opt/env/lib/python3.9/multiprocessing/context.py", line 68, in Lock
  File "/opt/env/lib/python3.9/multiprocessing/synchronize.py", line 57, in __init__
OSError: [Errno 28] No space left on device
"""
USER_SITE = """\
Traceback (most recent call last):
  File "/opt/env/lib/python3.11/site-packages/accelerate/x.py", line 2, in <module>
  File "/home/u/.local/lib/python3.11/site-packages/numpy/x.py", line 2, in <module>
ImportError: cannot import name 'x' from 'numpy'
"""
BARRIER = (
    "RuntimeError: Timed out initializing process group in store based barrier on rank: 0, for key: k "
    "(world_size={0}, worker_count={1}, timeout=0:30:00)\n"
)


class Case(NamedTuple):
    log: str
    cause: str
    sure: str
    rank: int | None = None
    node: str | None = None


CASES = {
    "the rank that raised, before those that waited": Case(
        WATCHDOG.format(rank=0, seq=4, op="ALLREDUCE") + BOOM.format(rank=2), "code", "likely", 2
    ),
    "code in a traceback is no output": Case(BOOM.format(rank=0), "code", "likely", 0),
    "the rank that torchrun saw first": Case(
        BOOM.format(rank=1) + BOOM.format(rank=3) + TORCHRUN.format(code=1), "code", "likely", 3
    ),
    "a mistake in the code": Case(
        'Traceback (most recent call last):\n  File "t.py", line 1, in f\nNameError: x\n', "code", "certain"
    ),
    "torchrun's report alone": Case(TORCHRUN.format(code=1), "exit-code", "unknown", 3, "node7"),
    "killed, by torchrun's report": Case(TORCHRUN.format(code=-9), "killed", "likely", 3, "node7"),
    "Slurm's word on memory explains the kill": Case(
        TORCHRUN.format(code=-9) + "slurmstepd: error: Detected 1 oom_kill event in StepId=1.0.\n",
        "host-memory",
        "certain",
    ),
    "memory ran out before the time limit": Case(
        "RuntimeError: CUDA out of memory.\n" + LIMIT, "gpu-memory", "certain"
    ),
    "what comes after the time limit follows from it": Case(LIMIT + BOOM.format(rank=0), "time-limit", "certain"),
    "a worker that is ended at the time limit": Case(
        LIMIT + "RuntimeError: DataLoader worker (pid 9) is killed by signal: Terminated.\n", "time-limit", "certain"
    ),
    "an oom kill that Slurm reports last": Case(
        LIMIT + "slurmstepd: error: Detected 1 oom_kill event in StepId=1.0.\n", "host-memory", "certain"
    ),
    "a timeout without a culprit": Case(
        "".join(WATCHDOG.format(rank=rank, seq=4, op="ALLREDUCE") for rank in range(2)), "nccl-timeout", "unknown", 0
    ),
    "a compiler cache, by the files of the traceback": Case(TRITON, "compiler-cache", "certain"),
    "another stale file": Case("OSError: [Errno 116] Stale file handle\n", "file-system", "certain"),
    "packages of two environments": Case(USER_SITE, "user-site", "likely"),
    "too many processes": Case(BARRIER.format(2, 4), "rank-mismatch", "likely", 0),
    "too few processes": Case(BARRIER.format(4, 2), "ranks-missing", "likely", 0),
    "the interface explains a lost connection": Case(
        "n1:1:1 [0] NCCL INFO Bootstrap : Using docker0:172.17.0.1<0>\nRuntimeError: Connection reset by peer\n",
        "wrong-interface",
        "likely",
    ),
    "an address of Docker": Case(
        "n1:1:1 [0] NCCL WARN socketStartConnect: Connect to 172.17.0.2<38> failed : Software caused abort\n",
        "wrong-interface",
        "likely",
        None,
        "n1",
    ),
    "srun names task and node": Case("srun: error: n4: task 2: Out Of Memory\n", "host-memory", "certain", 2, "n4"),
    "a lost connection alone": Case("RuntimeError: Connection reset by peer\n", "connection-lost", "unknown"),
    "behind a progress bar": Case(
        "1%\r 2%\r 3%[rank5]: RuntimeError: CUDA out of memory.\n", "gpu-memory", "certain", 5
    ),
    "an exception that was handled": Case(BOOM.format(rank=0) + "step\n" * 400 + LIMIT, "time-limit", "certain"),
    "an exception, then a hang until the time limit": Case(
        BOOM.format(rank=0) + "step\n" * 9 + LIMIT, "code", "likely", 0
    ),
    "the rank that failed first, not those that cannot connect to it": Case(
        BOOM.format(rank=0) + "[E socket.cpp:860] [c10d] The client socket has timed out after 60s\n",
        "code",
        "likely",
        0,
    ),
    "a full disk that is /dev/shm": Case(SEMAPHORE, "shared-memory", "likely"),
    "a loss that is NaN for three steps": Case("loss: nan\nloss: nan\nloss: nan\n", "nan", "likely"),
    "a warning is not certain": Case("x.py:3: UserWarning: Error 803: unsupported\n", "cuda-803", "likely"),
    "a hangup": Case("W1 api.py:9] Received 1 death signal, shutting down workers\n", "hangup", "likely"),
    "mpirun names the rank": Case(
        "[1,7]<stdout>:n1:1:1 [0] NCCL WARN NET/OFI Couldn't open AV\n", "infiniband", "likely", 7
    ),
    "a failure that the training survived": Case(
        "RuntimeError: CUDA out of memory.\nTraining completed.\n", "gpu-memory", "likely"
    ),
    "behind the prefix of a logger": Case(
        "2025-10-31 03:11:02,475 - Trainer - INFO - [rank7]: Traceback (most recent call last): (RANK 7)\n"
        '2025-10-31 03:11:02,475 - Trainer - INFO - [rank7]:   File "/home/u/t.py", line 1, in f\n'
        "2025-10-31 03:11:02,475 - Trainer - INFO - [rank7]: AssertionError\n",
        "code",
        "likely",
        7,
    ),
    "behind the prefix of torchrun": Case(
        "E0227 17:39:41.510000 29 torch/api.py:732] KeyError: 'lr'\n", "code", "likely"
    ),
    "colours": Case("\x1b[31m[rank1]: RuntimeError: CUDA out of memory.\x1b[0m\n", "gpu-memory", "certain", 1),
}
GOOD = """\
Setting OMP_NUM_THREADS environment variable for each process to be 1 in default
[W socket.cpp:426] [c10d] The server socket cannot be initialized on [::]:29500 (errno: 97 - Address family not \
supported by protocol).
n1:1:1 [0] NCCL INFO Bootstrap : Using ibs8:172.16.1.17<0>
n1:1:1 [0] NCCL INFO NET/Plugin: Plugin load returned 2 : libnccl-net.so: cannot open shared object file: No such file
n1:1:1 [0] NCCL INFO NET/IB : No device found.
x.py:13: UserWarning: Failed to load image Python extension: libx.so: cannot open shared object file: No such file
FutureWarning: `x` is deprecated
[rank0]:[W1 ProcessGroupNCCL.cpp:4115] using GPU 0 to perform barrier as devices are unknown. This can cause a hang.
INFO:    gocryptfs not found, will not be able to use gocryptfs
INFO: handlers for SIGTERM and SIGKILL are set, 0 errors
Found NaN, decreased lg_loss_scale to 19.2
[WARNING] CUDA_HOME does not exist, unable to compile CUDA op(s)
WARNING:urllib3.connectionpool:Retrying: HTTPSConnectionPool(host='huggingface.co', port=443): Read timed out.
bash: /root/.bashrc: Permission denied
A module that was compiled using NumPy 1.x cannot be run in NumPy 2.0.1 as it may crash.
resource_tracker: There appear to be 1 leaked semaphore objects to clean up at shutdown
step 10 loss 2.31
Training completed.
"""


def examine(*logs: str) -> Diagnosis:
    found = Examination()
    for number, log in enumerate(logs):
        found.read(f"log{number}", io.BytesIO(log.encode()))
    return found.diagnose()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_root_cause(case: Case) -> None:
    found = examine(case.log)
    assert found.root is not None
    first = found.root.first
    assert (first.cause.id, found.sure) == (case.cause, case.sure)
    assert case.rank in (None, first.rank) and case.node in (None, first.host)


def test_a_good_run_has_notes_only() -> None:
    found = examine(GOOD)
    assert (found.root, found.sure) == (None, "none")
    assert "NCCL does not use InfiniBand: log0:5" in found.notes
    assert next(lines(found)) == "no failure found in log0"


def test_the_rank_that_the_others_waited_for() -> None:
    log = "".join(WATCHDOG.format(rank=rank, seq=9 - (rank == 2), op="ALLREDUCE") for rank in range(4))
    found = examine(log)
    assert (found.sure, found.message) == (
        "likely",
        "the others waited for rank 2: they waited in collective 8, the others in 9",
    )
    silent = examine("comm rank 0 nranks 4\n" + "".join(WATCHDOG.format(rank=r, seq=9, op="X") for r in (0, 1, 3)))
    assert silent.message == "the others waited for rank 2: all other ranks reported the timeout"


def test_ranks_that_called_different_collectives() -> None:
    found = examine(WATCHDOG.format(rank=0, seq=9, op="ALLREDUCE"), WATCHDOG.format(rank=1, seq=9, op="BROADCAST"))
    assert (found.sure, found.message) == (
        "likely", "the ranks made different calls at the same point: ALLREDUCE, BROADCAST",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("timed out after 60s while trying to connect to (127.0.0.1, 29500)", "that of the node itself"),
        (
            "has failed to connect to any network address of (n1, 29500) errno: 111 - Connection refused",
            "nothing listens",
        ),
        ("has failed to connect to any network address of (n1, 29500) errno: 113 - No route to host", "no route"),
        ("timed out after 60s while trying to connect to (n1, 29500)", "no answer"),
    ],
)
def test_why_the_master_cannot_be_reached(text: str, message: str) -> None:
    found = examine(f"[E socket.cpp:860] [c10d] The client socket {text}.\n")
    assert found.root is not None and found.root.first.cause.id == "master-unreachable"
    assert message in found.message


def test_a_single_hint_is_a_note() -> None:
    assert examine("loss: nan\nloss: 0.4\n").notes == ("the loss or gradient became NaN or infinite: log0:1",)


def test_what_followed_is_listed() -> None:
    found = examine(BOOM.format(rank=2) + WATCHDOG.format(rank=0, seq=4, op="ALLREDUCE") + TORCHRUN.format(code=1))
    assert [each.first.cause.id for each in found.cascades] == ["nccl-timeout", "ended-by-launcher", "exit-code"]
    text = "\n".join(lines(found))
    assert "raised in /home/u/model.py:7" in text and "then      rank 0: a collective timed out" in text


def test_by_the_clock_over_files() -> None:
    late = "2026-01-01T10:00:09.0 RuntimeError: CUDA out of memory.\n"
    early = "2026-01-01T10:00:01.0 RuntimeError: CUDA out of memory.\n"
    root = examine(late, early).root
    assert root is not None and root.first.path == "log1"


@pytest.mark.parametrize(
    "data",
    [b"", b"\0" * 3_000_000, b"x" * 3_000_000, b"error " * 500_000, bytes(range(256)) * 4000,
     b"Traceback (most recent call last):\n" * 999,
     b"\r" * 100_000, b"\xff\xfe" * 1000, b"[" * 100_000, b"error\r" * 300_000],
)  # fmt: skip
def test_odd_bytes_are_no_failure(data: bytes) -> None:
    found = Examination()
    found.read("log", io.BytesIO(data + b"\n"))
    assert found.diagnose().root is None


def test_line_numbers_are_those_of_the_file() -> None:
    long = b"x" * 3_000_000 + b"\n"
    found = Examination()
    found.read("log", io.BytesIO(b"a\n" + long + b"\n\nb\rc\n" + long + b"RuntimeError: CUDA out of memory.\n"))
    root = found.diagnose().root
    assert root is not None and root.first.line == 7


def test_the_end_of_a_log_of_many_errors_is_read() -> None:
    found = Examination()
    text = "".join(
        f"error {chr(97 + i % 26)}{chr(97 + i // 26 % 26)}{chr(97 + i // 676 % 26)}{chr(97 + i // 17576)}\n"
        for i in range(70_000)
    )
    found.read("log", io.BytesIO(text.encode() + b"RuntimeError: CUDA out of memory.\n"))
    answer = found.diagnose()
    assert answer.root is not None and answer.root.first.line == 70_001
    assert answer.notes == ("log: too many different lines; not all were examined",)


def test_control_characters_are_escaped() -> None:
    text = "\n".join(lines(examine("RuntimeError: CUDA out of memory \x07\x9b31m \u202e\n")))
    assert "\\x07" in text and "\x07" not in text and "\u202e" not in text


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    (tmp_path / "logs/attempt-000/preflight").mkdir(parents=True)
    (tmp_path / "job.sh").touch()
    return RunFolder(tmp_path)


def write_events(folder: RunFolder, *events: dict[str, object]) -> None:
    folder.events.write_text("".join(json.dumps({"attempt": 0, **event}) + "\n" for event in events))


def test_a_run_by_its_node_logs(folder: RunFolder) -> None:
    write_events(folder, {"event": "attempt_started", "nodes": "n1 n2"})
    node_log(folder, 0, "n1").write_text("[rank0]: RuntimeError: [pair.cc:5] Connection closed by peer [10.0.0.2]:5\n")
    node_log(folder, 0, "n2").write_text(BOOM.format(rank=3))
    root = diagnose_run(folder).root
    assert root is not None
    assert (root.first.cause.id, root.first.rank, root.first.host) == ("code", 3, "n2")


@pytest.mark.parametrize(
    ("event", "cause", "rank"),
    [
        ({"event": "error", "kind": "ValueError", "message": "boom\nmore", "rank": 3, "node": "n2"}, "code", 3),
        ({"event": "error", "kind": "OutOfMemoryError", "message": "CUDA out of memory", "rank": 1}, "gpu-memory", 1),
        ({"event": "hang", "ranks": [2], "nodes": ["n2"], "phase": "data", "step": 4, "waited": 30}, "hang", 2),
        ({"event": "rank_exited", "rank": 3, "node": "n2", "exit_code": None, "signal": "SIGKILL"}, "killed", 3),
        ({"event": "rank_exited", "rank": 3, "node": "n2", "exit_code": None, "signal": "SIGSEGV"}, "segfault", 3),
        ({"event": "node_excluded", "excluded": "n3", "reason": "/dev/shm has 64 MB"}, "preflight", None),
        ({"event": "job_ended", "slurm_state": "TIMEOUT", "decision": "failed"}, "time-limit", None),
        ({"event": "job_ended", "slurm_state": "NODE_FAIL", "decision": "failed"}, "node-failure", None),
    ],
)
def test_a_run_by_its_events(folder: RunFolder, event: dict[str, object], cause: str, rank: int | None) -> None:
    write_events(folder, {"event": "attempt_started", "nodes": "n1"}, event)
    root = diagnose_run(folder).root
    assert root is not None
    assert (root.first.cause.id, root.first.rank, root.first.line) == (cause, rank, 2)


LIMIT = "slurmstepd: error: *** JOB 1 ON n1 CANCELLED AT 2026-11-25T14:56:52 DUE TO TIME LIMIT ***\n"


def test_what_ended_an_earlier_attempt_is_not_why_the_newest_runs(folder: RunFolder) -> None:
    """job.log goes on over all starts of the job."""
    folder.job_log.write_text(f"{LIMIT}2026-11-25 14:57:00 job.sh: attempt 1 on n1\n")
    write_events(
        folder,
        STEP,
        {"event": "job_ended", "slurm_state": "TIMEOUT", "decision": "requeue"},
        {**STEP, "attempt": 1},
    )
    (folder.attempt_logs(1)).mkdir()
    (folder.attempt_logs(1) / "job_log_begin").write_text(f"{len(LIMIT)}\n")
    found = diagnose_run(folder)
    assert (found.root, found.sure) == (None, "none")
    with folder.job_log.open("a") as file:
        file.write(f"step 1\n{LIMIT}")
    root = diagnose_run(folder).root
    assert root is not None and (root.first.cause.id, root.first.line) == ("time-limit", 4)


@pytest.mark.parametrize("steps", [False, True])
def test_of_a_crash_loop_doctor_reads_the_attempt_that_status_names(folder: RunFolder, steps: bool) -> None:
    told = "RuntimeError: operator torchvision::nms does not exist"
    write_events(
        folder,
        *([STEP] if steps else []),
        {"event": "attempt_ended", "cause": told, "rank": 0, "node": "n1", "decision": "next", "exit_code": 1},
        {"event": "attempt_started", "attempt": 1},
    )
    node_log(folder, 0, "n1").write_text(BOOM.format(rank=0).replace("ValueError: boom", told))
    folder.attempt_logs(1).mkdir()
    node_log(folder, 1, "n1").write_text("loading\n")
    found = diagnose_run(folder)
    if steps:
        assert found.root is None
    else:
        assert found.root is not None and told in found.root.first.text
        assert "attempt 1 has no failure so far: this is why attempt 0 failed" in found.notes
        assert failing_attempt(folder, 1) == 0


BUS_ERROR = "Fatal Python error: Bus error\n"
KILLED = {"event": "rank_exited", "rank": 1, "node": "n1", "exit_code": None, "signal": "SIGSEGV"}
STEP = {"event": "first_step", "rank": 0, "step": 1}
CANCEL = {"event": "cancel_requested", "now": True}


@pytest.mark.parametrize(
    ("events", "cause"),
    [
        # Ranks whose container is taken away die by a bus error: that is not why the job ended.
        ([STEP, CANCEL, {"event": "attempt_ended", "cause": "cancelled", "decision": "cancelled"}], None),
        ([STEP, CANCEL, KILLED], None),
        ([KILLED, STEP, CANCEL], None),
        ([STEP, {"event": "attempt_ended", "ended_by": "time limit", "decision": "requeue"}], "time-limit"),
        # What made the user cancel the run stays its cause.
        ([STEP, KILLED, CANCEL], "segfault"),
        ([STEP, {"event": "attempt_ended", "cause": "rank 1 died", "decision": "failed"}], "bus-error"),
    ],
)
def test_what_ends_a_job_from_outside_explains_the_exits(folder: RunFolder, events: list, cause: str | None) -> None:
    write_events(folder, {"event": "attempt_started", "nodes": "n1"}, *events)
    late = "slurmstepd-n1: error: *** JOB 1 ON n1 CANCELLED AT 2026-11-25T14:56:52 DUE TO TIME LIMIT ***\n"
    folder.job_log.write_text(late if cause in (None, "time-limit") else "")
    node_log(folder, 0, "n1").write_text("step 1\n" + ("" if cause == "segfault" else BUS_ERROR))
    found = Examination()
    read_run(found, folder)
    diagnosis = found.diagnose()
    assert (diagnosis.root and diagnosis.root.first.cause.id) == cause
    assert not any("slurmddp status shows how they are" in note for note in diagnosis.notes), "they are no more"
    cancelled = f"run {folder.id} was cancelled with slurmddp cancel"
    assert (cancelled in diagnosis.notes) == (CANCEL in events)


@pytest.mark.parametrize(
    ("events", "end", "cause"),
    [
        # job.sh was killed before it wrote of the end.
        (
            [STEP],
            "slurmstepd: error: *** JOB 1 ON n1 CANCELLED AT 2026-11-25T14:56:52 DUE TO TIME LIMIT ***",
            "time-limit",
        ),
        # One rank was killed; what the others died of came later.
        ([STEP, {**KILLED, "signal": "SIGKILL"}], "", "killed"),
    ],
)
def test_the_bus_errors_of_containers_that_are_taken_away(
    folder: RunFolder, events: list, end: str, cause: str
) -> None:
    write_events(folder, {"event": "attempt_started", "nodes": "n1"}, *events)
    node_log(folder, 0, "n1").write_text(f"step 1\n{end}\n")
    node_log(folder, 0, "n2").write_text(BUS_ERROR)
    refused = "srun: error: Unable to create step for job 5: Job/step already completing or completed\n"
    (folder.attempt_logs(0) / "srun.err").write_text(f"srun: error: n2: task 1: Bus error\n{refused}")
    root = diagnose_run(folder).root
    assert root is not None and (root.first.cause.id, root.hosts[:1]) == (cause, ("n1",))


@pytest.mark.parametrize(("reason", "cause"), [("time limit", None), ("preemption", "preemption")])
def test_a_requeue_by_job_sh_is_no_preemption(folder: RunFolder, reason: str, cause: str | None) -> None:
    requeued = {"event": "requeued", "how": "requeue", "reason": reason}
    write_events(folder, {"event": "attempt_started", "nodes": "n1"}, STEP, requeued)
    folder.job_log.write_text(
        "slurmstepd-n1: error: *** JOB 1 ON n1 CANCELLED AT 2026-11-25T15:19:10 DUE TO JOB REQUEUE ***\n"
    )
    root = diagnose_run(folder).root
    assert (root and root.first.cause.id) == cause


@pytest.mark.parametrize(
    ("job", "log", "rank"),
    [
        ("launch: {mode: torchrun}\n", "", None),
        ("launch: {mode: srun}\n", "", 1),
        # Not known from the job: torchrun writes so in its logs.
        (None, "W1126 torch.distributed.elastic.agent.server.api: Received 15 death signal\n", None),
        (None, "", 1),
    ],
)
def test_a_task_of_srun_is_a_rank_where_srun_starts_the_ranks(
    folder: RunFolder, job: str | None, log: str, rank: int | None
) -> None:
    write_events(folder, {"event": "attempt_started", "nodes": "n1"})
    if job:
        folder.job_yaml.write_text(job)
    node_log(folder, 0, "n1").write_text(f"step 1\n{log}")
    (folder.attempt_logs(0) / "srun.err").write_text("srun: error: n2: task 1: Killed\n")
    root = diagnose_run(folder).root
    assert root is not None and (root.first.cause.id, root.first.rank, root.first.host) == ("killed", rank, "n2")


def test_a_run_whose_preflight_failed(folder: RunFolder) -> None:
    write_events(folder, {"event": "attempt_started", "nodes": "n1"})
    folder.job_log.write_text("slurmddp: all nodes are bad\n")
    (folder.attempt_logs(0) / "preflight/n1.failed").write_text(Refusal("no GPU").write())
    root = diagnose_run(folder).root
    assert root is not None and (root.first.cause.id, root.first.host) == ("preflight", "n1")


def test_a_run_that_is_done_or_has_no_logs(folder: RunFolder) -> None:
    write_events(folder, {"event": "job_ended", "decision": "done"})
    assert is_done(folder)
    with pytest.raises(UserError, match="has no logs yet"):
        diagnose_run(folder)


def test_a_traceback_that_never_ends_does_not_switch_the_limits_off() -> None:
    found = Tracebacks("x")
    found.feed(1, "Traceback (most recent call last):", 0, None)
    for number in range(2, 500):
        found.feed(number, "loss 1", 1, None)
    assert not found.active


def test_the_lines_of_one_cause_that_are_kept_are_limited() -> None:
    found = Examination()
    log = "".join(f"ValueError: {number:x} {'x' * (number % 150)}\n" for number in range(5000))
    found.read("log", io.BytesIO(log.encode()))
    assert len(found.hits) == 2000
    assert len([note for note in found.diagnose().notes if "only the first 2000 lines" in note]) == 1


def test_a_long_name_of_an_exception_costs_little() -> None:
    begun = time.process_time()
    Tracebacks("x").feed(1, "A" + "Error" * 780 + "!", None, None)
    assert time.process_time() - begun < 0.05


def test_events_of_others_are_bounded(folder: RunFolder) -> None:
    hang = {"event": "hang", "ranks": 7, "nodes": {"a": 1}, "node": [1], "attempt": None, "rank": "x"}
    error = {"event": "error", "kind": "ValueError", "message": "x" * 50_000, "attempt": None}
    deep = b'{"event": "error", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    long = b'{"event": "error", "kind": "KeyError", "message": "' + b"y" * 2**21 + b'", "attempt": null}'
    lines = [deep, long, json.dumps(hang).encode(), json.dumps(error).encode()]
    folder.events.write_bytes(b"\n".join(lines) + b"\n")
    found = Examination()
    read_run(found, folder)
    assert [hit.line for hit in found.hits if hit.path == str(folder.events)] == [3, 4]
    assert max(len(hit.text) for hit in found.hits) < 3000


def hostile(text: str, lines: int) -> bytes:
    """Lines of one kind, each of which the reader takes for a new one."""
    return b"".join(
        f"error {number:x} {'abcdefghij'[number % 10] * (number % 97)} {text}\n".encode() for number in range(lines)
    )


SLOW = {
    "parts of a pattern": "NET/IBasync" * 300,
    "a pattern without its end": "libibverbs couldn't " * 180,
    "spaces in a traceback": "Traceback (most recent call last)" + " " * 3800 + "x",
    "an exception's name": "A" + "Error" * 700 + "!",
}


@pytest.mark.parametrize("text", SLOW.values(), ids=SLOW)
def test_hostile_lines_cost_no_more_than_the_budget(text: str) -> None:
    """The end of the log is read in any case, and what was left out is named."""
    found = Examination(budget=Budget(0.5))
    begun = time.thread_time()
    found.read("log", io.BytesIO(hostile(text, 2000) + b"RuntimeError: CUDA out of memory.\n"))
    answer = found.diagnose()
    assert time.thread_time() - begun < 5
    assert answer.root is not None and answer.root.first.line == 2001
    assert not found.incomplete or "lines 0" not in answer.notes[0]


def test_what_was_not_examined_is_unknown() -> None:
    found = Examination(budget=Budget(0.1))
    found.read("log", io.BytesIO(hostile("x" * 3000, 2000)))
    while found.budget.begin():
        continue  # the rest of its time
    found.read("later.log", io.BytesIO(b"RuntimeError: CUDA out of memory.\n"))
    answer = found.diagnose()
    assert (answer.root, answer.sure) == (None, "unknown")
    assert re.match(
        r"log: (lines \d+ to \d+|\d+ lines) were not examined: doctor searches for 0.1 s at most", answer.notes[0]
    )
    assert answer.notes[1].startswith("later.log was not examined")
    assert next(lines(answer)) == "unknown   a part of 2 files was not examined"


def test_no_pattern_costs_a_line_its_length_squared() -> None:
    for cause in catalogue().causes:
        for pattern in cause.patterns:
            assert not any(".*" in part.pattern for part in pattern.parts), pattern.text


def test_a_killed_rank_after_which_the_run_went_on_is_a_note(folder: RunFolder) -> None:
    killed = {"event": "rank_exited", "rank": 3, "node": "n2", "exit_code": None, "signal": "SIGKILL"}
    write_events(folder, {"event": "attempt_started"}, killed, {"event": "first_step", "rank": 0, "step": 7})
    node_log(folder, 0, "n1").write_text("step 1 loss 2.0\n")
    answer = diagnose_run(folder)
    told = "rank 3 on n2: killed by SIGKILL (out of memory?); the ranks started again"
    assert answer.root is None and told in answer.notes
    assert any(note.startswith("the ranks have made steps again since") for note in answer.notes)
    assert list(survived_failures(folder)) == [told]


@pytest.mark.parametrize(
    ("event", "node"),
    [({"event": "attempt_ended", "decision": "next", "cause": "Slurm lost the node (NodeFail)", "node": "n3"}, "n3"),
     ({"event": "job_ended", "decision": "failed", "slurm_state": "NODE_FAIL", "node": "n1"}, None)],
)  # fmt: skip
def test_the_node_that_slurm_lost(folder: RunFolder, event: dict[str, object], node: str | None) -> None:
    """The node of a job_ended is the one that wrote it."""
    write_events(folder, {"event": "attempt_started"}, event)
    root = diagnose_run(folder).root
    assert root is not None and (root.first.cause.id, root.first.host) == ("node-failure", node)


@pytest.mark.parametrize(
    ("text", "job_id", "shown"),
    [
        ("slurmstepd: error: *** JOB 608 ON n1 CANCELLED AT 2026-08-12T02:06:12 ***", "", "sacct -j 608 "),
        ("Received SIGINT death signal, shutting down workers", "77", "sacct -j 77 "),
        ("Received SIGINT death signal, shutting down workers", "", "sacct -j JOB "),
    ],
)
def test_advice_names_the_job(text: str, job_id: str, shown: str) -> None:
    examination = Examination(job_id=job_id)
    examination.read("job.log", io.BytesIO(text.encode()))
    assert shown in examination.diagnose().fix
