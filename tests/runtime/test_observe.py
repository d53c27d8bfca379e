"""A script of the user's own is watched without a change to it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d

from slurmddp.doctor.diagnose import Examination
from slurmddp.doctor.sources import read_path
from slurmddp.runtime.observe import hangs
from slurmddp.runtime.observe.ddp_times import DdpTimes, Times
from slurmddp.runtime.observe.shares import Spent, line_seconds
from slurmddp.runtime.observe.signs import Steps

from .harness import PATIENCE, ROOT, Run

Wait = Callable[[Callable[[], object]], None]
#: Plain DDP over gloo. BEFORE stands before the training, IN_STEP in each step.
DDP = """\
import os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

rank = int(os.environ["RANK"])
BEFORE
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, STEPS + 1):
    IN_STEP
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def write(folder: Path, *, steps: int = 12, before: str = "", in_step: str = "pass") -> Path:
    path = folder / "own.py"
    path.write_text(DDP.replace("BEFORE", before).replace("IN_STEP", in_step).replace("STEPS", str(steps)))
    return path


def launch(
    folder: Path,
    script: Path,
    *,
    size: int = 2,
    observe: dict[str, Any] | None,
    path: str = "",
    meanwhile: Callable[[Wait], None] = lambda wait: None,
    **more: str,
) -> "subprocess.CompletedProcess[str]":
    """The script as node.sh starts it. observe: SLURMDDP_OBSERVE; None: it is not set."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    command += ["--max-restarts=1", "-m", "slurmddp.runtime.begin", str(script)]
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *([path] if path else [])]),
        "SLURMDDP_RUN": str(folder),
        "SLURMDDP_NODE": "here",
        "SLURMDDP_ATTEMPT": "0",
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",
        **({"SLURMDDP_OBSERVE": json.dumps(observe)} if observe is not None else {}),
        **more,
    }
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=variables, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            meanwhile(partial(wait_for, process))
            out, err = process.communicate(timeout=PATIENCE)
        except BaseException:
            process.terminate()  # torchrun then ends its ranks
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def wait_for(process: "subprocess.Popen[str]", condition: Callable[[], object]) -> None:
    """Until the condition holds; fails where the process exits before."""
    until = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None and time.monotonic() < until, process.communicate()
        time.sleep(0.1)


def test_steps_of_a_plain_script_are_seen(tmp_path: Path) -> None:
    """With a sitecustomize of the user's own, data workers that fork, and a child of python -c."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/sitecustomize.py").write_text("import sys\nprint('mine', sys.argv[0][-6:], file=sys.stderr)\n")
    before = """
class Data(torch.utils.data.Dataset):
    def __len__(self): return 2
    def __getitem__(self, index):
        import threading
        return torch.tensor(sum("slurmddp" in thread.name for thread in threading.enumerate()))
seen = [sum("slurmddp" in thread.name for thread in __import__("threading").enumerate())]
seen += [int(value) for value in torch.utils.data.DataLoader(Data(), num_workers=1)]
import subprocess
code = "import sys, torch, threading; print('slurmddp.runtime.observe.observer' in sys.modules)"
child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()
print("seen", rank, *seen, child, flush=True)
"""
    done = launch(
        tmp_path, write(tmp_path, before=before, in_step="time.sleep(0.2)"), observe={}, path=str(tmp_path / "mine")
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"seen {rank} 1 0 0 False" in done.stdout, "one thread in the rank, none in its workers and its child"
    assert "mine own.py" in done.stderr
    run = Run(tmp_path)
    lines = run.lines("metrics.jsonl")
    assert [line["step"] for line in lines][-1] == 12 and lines[-1]["steps_per_second"] > 0
    assert {line["attempt"] for line in lines} == {0}
    (first,) = run.events("first_step")
    assert first["rank"] == 0 and 1 <= first["step"] <= 12
    assert (tmp_path / "progress").read_text() == "12\n"
    assert "seconds" not in lines[0] and lines[-1]["seconds"]["compute"] > 0.5, "it sleeps"
    assert sum(lines[-1]["seconds"].values()) == pytest.approx(lines[-1]["time"] - lines[0]["time"], abs=0.5)
    assert "slurmddp: warning" not in done.stderr
    assert run.events("no_process_group") == []


@pytest.mark.parametrize(("parts", "replaced", "steps"), [(2, False, 5), (2, True, 5), (1, True, 4)])
def test_a_step_for_one_group_after_the_other_is_one_step(parts: int, replaced: bool, steps: int) -> None:
    """As DeepSpeed steps. Parameters that the script replaces may cost a step, but do not stop the count."""
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))]} for _ in range(parts)]
    optimizer = torch.optim.AdamW(groups)
    groups = optimizer.param_groups
    counted = Steps()
    try:
        for number in range(5):
            if replaced and number == 3:
                groups[0]["params"][0] = torch.nn.Parameter(torch.ones(2))
            for group in groups:
                group["params"][0].grad = torch.ones(2)
                optimizer.param_groups = [group]
                optimizer.step()
    finally:
        counted.remove()
    assert (counted.done, counted.began, counted.seen) == (steps, 1, 5 * parts)


def test_without_its_variable_nothing_is_seen(tmp_path: Path) -> None:
    done = launch(tmp_path, write(tmp_path, steps=2), size=1, observe=None)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "metrics.jsonl").exists() and not (tmp_path / "progress").exists()


def test_a_failure_of_the_observer_does_not_stop_the_script(tmp_path: Path) -> None:
    """It fails in one rank, after its start."""
    before = """
from slurmddp.runtime.observe import observer
if rank == 0: observer.Observer._look = None
print("trained", rank, flush=True)
"""
    done = launch(tmp_path, write(tmp_path, before=before, in_step="time.sleep(0.02)"), observe={})
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("rank 0 is no longer observed") == 1 and "rank 1 is" not in done.stderr


@pytest.mark.long
def test_an_observer_with_wrong_settings_does_not_stop_the_script(tmp_path: Path) -> None:
    broken = launch(tmp_path, write(tmp_path, steps=2), size=1, observe={"period": "x"})
    assert broken.returncode == 0, broken.stderr
    assert broken.stderr.count("slurmddp: warning") == 1


def test_a_step_that_the_script_tells_counts_more(tmp_path: Path) -> None:
    """Steps of a state that was loaded count too, where the optimizer has them."""
    before = "progress = os.environ['SLURMDDP_PROGRESS_FILE']"
    told = "open(progress, 'w').write(f'{1000 + step}') if step > 3 else None; time.sleep(0.2)"
    script = write(tmp_path, steps=8, before=before, in_step=told)
    done = launch(tmp_path, script, size=1, observe={"period": 0.1}, SLURMDDP_PROGRESS_FILE=str(tmp_path / "progress"))
    assert done.returncode == 0, done.stderr
    assert Run(tmp_path).lines("metrics.jsonl")[-1]["step"] == 1008
    assert (tmp_path / "progress").read_text() == "1008"


@pytest.mark.long  # test_observe_restart.py counts them, too
def test_steps_of_a_loaded_state_count(tmp_path: Path) -> None:
    adam = """
import io
model = torch.nn.Linear(4, 4)
def train(optimizer, steps):
    for _ in range(steps):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
old = torch.optim.AdamW(model.parameters())
train(old, 5)
new = torch.optim.AdamW(model.parameters())
new.load_state_dict(old.state_dict())
train(new, 3)
raise SystemExit(0)
"""
    done = launch(tmp_path, write(tmp_path, before=adam), size=1, observe={})
    assert done.returncode == 0, done.stderr
    assert Run(tmp_path).lines("metrics.jsonl")[-1]["step"] == 8


@pytest.mark.long
def test_where_the_time_went(tmp_path: Path) -> None:
    """Rank 0 waits for data, for rank 1, and for its checkpoint; an optimizer that steps within backward is no harm."""
    before = """
class Data(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            time.sleep(0.02)
            yield torch.randn(4)
data = iter(torch.utils.data.DataLoader(Data(), batch_size=2)) if rank == 0 else None
def save():
    until = time.monotonic() + 1
    while time.monotonic() < until:
        torch.save(torch.zeros(10**6), sys.argv[0] + ".saved")
"""
    in_step = """
    if rank == 0: next(data)
    else: time.sleep(0.14)
    if step == 2:
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        next(model.parameters()).register_post_accumulate_grad_hook(lambda _: inner.step())
    if rank == 0 and step == 20: save()
"""
    done = launch(tmp_path, write(tmp_path, steps=60, before=before, in_step=in_step.strip()), observe={"period": 2})
    assert done.returncode == 0, done.stderr
    assert "slurmddp: warning" not in done.stderr
    spent = Run(tmp_path).lines("metrics.jsonl")[-1]["seconds"]
    assert set(spent) <= {"data", "checkpoint", "compute", "network", "overlap"} and "checkpoint" in spent, spent
    assert spent["data"] > 1 and spent["network"] > 2 and spent["network"] > 5 * spent.get("compute", 0), spent


#: Whether this torch records what gloo does: not in its older versions.
RECORDER = hasattr(torch._C._distributed_c10d, "_dump_fr_trace")
PARTS = {"data": 2.0, "checkpoint": 0.0, "compute": 5.0, "network": 3.0}


@pytest.mark.parametrize(
    ("ddp", "gpu", "seconds"),
    [
        (None, False, {"data": 2, "compute": 5, "network": 3}),
        # A hang that DDP's own samples missed is in the looks.
        (Times(0.01, 0.1), False, {"data": 2, "compute": 5, "network": 2, "overlap": 1}),
        (Times(0.01, 9.0), False, {"data": 2, "compute": 5, "overlap": 3}),
        (None, True, {"data": 2, "unmeasured": 8}),
        (Times(0.2, 0.1), True, {"data": 2, "compute": 5, "network": 2, "overlap": 1}),
        (Times(9.0, 0.1), True, {"data": 2, "network": 8}),
    ],
)
def test_the_parts_of_a_line(ddp: Times | None, gpu: bool, seconds: dict[str, float]) -> None:
    assert line_seconds(Spent(10, 10.0, PARTS), ddp, gpu=gpu) == seconds
    assert line_seconds(Spent(0, 0.01, {}), ddp, gpu=gpu) == {}


class Ddp:
    """What DDP tells. Steps 2 and 100 were measured."""

    def __init__(self) -> None:
        self.told: dict[str, Any] = {}

    def tell(self, step: int, network: float, overlap: float) -> None:
        self.told = {"iteration": step, "backward_comm_time": int(network * 1e9)}
        self.told["backward_compute_comm_overlap_time"] = int(overlap * 1e9)

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return self.told


def test_ddps_own_times(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    first, second = Ddp(), Ddp()
    times = DdpTimes(threading.get_ident())
    assert not times.look() and times.window() is None
    for active in (first, first, second):
        monkeypatch.setattr(torch.nn.parallel.DistributedDataParallel, "_active_ddp_module", active)
        assert times.look()
    times.read()
    first.tell(1, 9, 0)
    times.read()
    assert times.window() is None, "nothing was measured yet, and the first step also connects"
    first.tell(2, 0.5, 0.25)
    times.read()
    times.read()
    first.tell(3, 1.0, 0.25)
    second.tell(2, 0.125, 0.5)
    times.read()
    assert times.window() == times.window() == (0.5, 0.75), "the mean of the new ones, else the newest"
    first.tell(100, 0.25, 0.25)
    times.read()
    assert times.window() == (0.0, 0.75)
    thread = threading.Thread(target=first.tell(200, 9, 0) or times.read)
    thread.start()
    thread.join()
    assert times.window() == (0.0, 0.75), "only the main thread may ask"
    first.told = {"iteration": None}
    times.read()
    assert times.window() is None and not times.look()
    assert capfd.readouterr().err.count("DDP's own times are not read: TypeError") == 1


#: What a rank does instead of the next step, by the kind of hang that it is.
STALLS = {
    "behind": """
def stall():
    while not os.path.exists(release):
        time.sleep(0.1)
""",
    "silent": """
def stall():
    open(release + ".pid", "w").write(str(os.getpid()))
    os.kill(os.getpid(), 19)
""",
}


@pytest.mark.parametrize("kind", ["behind", pytest.param("silent", marks=pytest.mark.long)])
def test_a_hang_names_the_rank_that_did_not_join_and_stops_nothing(tmp_path: Path, kind: str) -> None:
    release = tmp_path / "release"
    run = Run(tmp_path)

    def look(wait: Wait) -> None:
        wait(lambda: run.events("hang_reported"))
        stacks = Path(run.events("hang_reported")[0]["stacks"])
        wait(lambda: len(list(stacks.iterdir())) == (2 if kind == "behind" else 1) * (1 + RECORDER))
        release.touch()
        if kind == "silent":
            os.kill(int((tmp_path / "release.pid").read_text()), signal.SIGCONT)

    before = f"release = {str(release)!r}\n{STALLS[kind]}"
    in_step = "time.sleep(0.02)\n    if rank == 1 and step == 30: stall()"
    script = write(tmp_path, steps=60, before=before, in_step=in_step)
    done = launch(tmp_path, script, observe={"hang": 2, "period": 1}, meanwhile=look)
    assert done.returncode == 0, done.stderr
    (hang,) = run.events("hang_reported")
    assert (hang["kind"], hang["ranks"], hang["nodes"]) == (kind, [1], ["here"])
    assert hang["step"] == 29 if kind == "behind" else hang["step"] <= 29, "or when it was last heard of"
    if kind == "behind" and RECORDER:
        diagnosis = Examination()
        read_path(diagnosis, Path(hang["stacks"]))
        known = diagnosis.diagnose().message
        assert known.startswith("the others waited for rank 1: ") and "they did not join all_reduce " in known
    assert hang["waited"] >= 2 and "hang: rank 1 on here did not join the others" in done.stderr
    texts = {path.name: path.read_text() for path in Path(hang["stacks"]).glob("*.txt")}
    assert "_engine_run_backward" in texts["rank-00000.txt"], "it waits for the other one's gradients"
    if kind == "behind":
        assert "in stall" in texts["rank-00001.txt"]
    assert len(run.events("hang_over")) == 1 and not run.events("hang")
    assert run.lines("metrics.jsonl")[-1]["step"] == 60
    assert "no longer observed" not in done.stderr


@pytest.mark.parametrize(
    ("kind", "stall", "waits"),
    [
        ("behind", "time.sleep(1)", 2),
        # Rank 0 judges where it can. torchrun kills it in 30 s; our agent does so at once.
        pytest.param("silent", "os.kill(os.getpid(), 19)", 1, marks=pytest.mark.long),
    ],
)
def test_a_hang_restarts_the_ranks_where_the_job_wants_that(tmp_path: Path, kind: str, stall: str, waits: int) -> None:
    first, stalled = "os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'", 0 if kind == "silent" else 1
    in_step = f"time.sleep(0.02)\n    while rank == {stalled} and step == 30 and {first}: {stall}"
    script = write(tmp_path, steps=40, in_step=in_step)
    done = launch(tmp_path, script, observe={"hang": 3, "restart": True})
    assert done.returncode == 0, done.stderr
    run = Run(tmp_path)
    (hang,) = run.events("hang")
    assert (hang["kind"], hang["ranks"], hang["nodes"]) == (kind, [stalled], ["here"])
    assert "the ranks restart" in done.stderr and not run.events("hang_reported")
    for ending in ("txt", "pickle") if RECORDER else ("txt",):
        assert len(list(tmp_path.glob(f"trace/attempt-000/observed-0/hang-1/rank-*.{ending}"))) == waits
    assert run.lines("metrics.jsonl")[-1]["step"] == 40


@pytest.mark.long
def test_a_slow_rank_is_named(tmp_path: Path) -> None:
    script = write(tmp_path, steps=80, in_step="time.sleep(0.2 * rank)")
    done = launch(tmp_path, script, observe={"period": 1})
    assert done.returncode == 0, done.stderr
    begins = Run(tmp_path).events("straggler_begins")
    assert [(event["slow_rank"], event["part"], event["rank"]) for event in begins] == [(1, "compute", 0)]
    assert "straggler: rank 1 on here is slow in compute" in done.stderr


def test_the_recorder_of_the_backend_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rank-00000.pickle"
    assert hangs.dump_recorder(path) == RECORDER and (not RECORDER or path.read_bytes()[:1] == b"\x80")
    assert not hangs.dump_recorder(tmp_path / "missing/rank-00000.pickle")
    assert ("no dump of the flight recorder: FileNotFoundError" in capfd.readouterr().err) == RECORDER
    monkeypatch.setattr(type(distributed_c10d._world), "pg_map", {0: ("cpu:gloo,cuda:nccl", None)})
    nccl = torch._C._distributed_c10d
    monkeypatch.setattr(nccl, "_dump_nccl_trace", lambda includeStackTraces: b"nccl", raising=False)
    assert hangs.dump_recorder(path) and path.read_bytes() == b"nccl"
    monkeypatch.delattr(nccl, "_dump_nccl_trace")
    assert not hangs.dump_recorder(path), "a torch without NCCL"
