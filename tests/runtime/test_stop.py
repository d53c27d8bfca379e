"""Stopping: a file, signals, and a parent that is gone; under the real launcher where processes matter."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.elastic.multiprocessing import api

from slurmddp.records.marker import Marker
from slurmddp.records.stop import StopRequest
from slurmddp.runtime import torch_private
from slurmddp.runtime.environment import stat_fields
from slurmddp.runtime.evaluation import evaluate
from slurmddp.runtime.watch import marker
from slurmddp.runtime.watch.stop import Stop
from slurmddp.runtime.watch.watch import Watch
from slurmddp.runtime.world import World

from . import toy
from .harness import HERE, PATIENCE, ROOT, Ranks, Run, place
from .launched import alive, launched, until

TROUBLED = {
    "train__task": "runtime.troubled:create",
    "train__steps": 400,
    "train__evaluate__at_end": False,
    "train__replica_check_every": None,
    "batch__global": 2,
    "batch__micro": 1,
    "checkpoint__every_steps": None,
    "checkpoint__asynchronous": False,
}


def trouble(kind: str, *, rank: int = 1, call: int = 6, where: str = "loss", **more: object) -> dict[str, object]:
    return {"kind": kind, "rank": rank, "call": call, "where": where, **more}


def stopped_alike(run: Run, step: int, reason: str) -> None:
    """All ranks ended after `step`, it was saved, and the marker says so."""
    record = run.marker()
    assert {key: record[key] for key in ("state", "step", "reason")} == {
        "state": "stopped",
        "step": step,
        "reason": reason,
    }
    assert run.saved() == [f"step-{step:08d}"]
    assert (run.checkpoint(step) / "COMPLETE").exists()
    stream = run.stream(0)
    assert max(stream) == step and all(len(ids) == 2 for ids in stream.values())


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("kind", "rank"),
    [
        pytest.param("SIGUSR1", 1, marks=pytest.mark.long),
        ("SIGTERM", 1),
        pytest.param("SIGUSR2", 0, marks=pytest.mark.long),
    ],
)
def test_signal_to_one_rank_stops_all_after_the_next_step(tmp_path: Path, kind: str, rank: int) -> None:
    """The signal comes within step 5; its wish travels with the losses of step 6. The rank's data worker gets it, too,
    and survives, or step 6 would have no data.
    """
    data = {"trouble": trouble(kind, rank=rank)}
    run = Run.create(tmp_path / "run", **TROUBLED, train__data=data, train__workers=1, train__prefetch=1)
    with launched(run, 2) as job:
        assert job.wait() == 0, job.stderr
    stopped_alike(run, 6, f"{kind} received by rank {rank} on here")
    assert run.marker()["signal"] == {"name": kind, "rank": rank, "node": "here"}


@pytest.mark.long  # tests/cluster/test_training.py writes one, too
@pytest.mark.ranks(2)
def test_stop_file_is_seen_within_a_second(tmp_path: Path) -> None:
    """Made in step 5, steps take at least 0.4 s each: at most 3 begin in the second until somebody looks, and the
    one after that is the last.
    """
    path = tmp_path / "stop"
    data = {"trouble": trouble("stop_file", path=str(path)), "pace": 0.4}
    run = Run.create(tmp_path / "run", **TROUBLED, train__data=data)
    with launched(run, 2, SLURMDDP_STOP_FILE=str(path)) as job:
        assert job.wait() == 0, job.stderr
    last = run.marker()["step"]
    assert 6 <= last <= 9
    stopped_alike(run, last, "made by the task")


@pytest.mark.ranks(2)
def test_stop_file_that_is_there_from_the_start(tmp_path: Path, ranks: Ranks) -> None:
    run = Run.create(tmp_path / "run")
    (tmp_path / "stop").write_text("")
    ranks.train(2, run, stop_file=tmp_path / "stop")
    record = run.marker()
    assert (record["state"], record["step"], record["reason"]) == ("stopped", 0, "stop file")
    assert not run.losses(0)


@pytest.mark.long  # the next test shows it without torchrun
@pytest.mark.ranks(2)
@pytest.mark.parametrize("at_end", [False, True])
def test_evaluation_is_given_up(tmp_path: Path, at_end: bool) -> None:
    """The signal comes in the third of nine rounds on rank 1: the state of that step is saved, and the marker says
    stopped."""
    data = {"trouble": trouble("SIGUSR1", call=3, where="validation"), "validation": 18}
    changes = {
        "train__steps": 4,
        "train__evaluate__at_end": at_end,
        "train__evaluate__every_steps": None if at_end else 3,
    }
    run = Run.create(tmp_path / "run", **{**TROUBLED, **changes}, checkpoint__at_end=False, train__data=data)
    with launched(run, 2) as job:
        assert job.wait() == 0, job.stderr
    stopped_alike(run, 4 if at_end else 3, "SIGUSR1 received by rank 1 on here")
    assert not run.events("evaluated")


class Counting(torch.nn.Module):
    """Asks to stop in its third forward pass."""

    def __init__(self, watch: Watch, asks: bool) -> None:
        super().__init__()
        self.calls = 0
        self._watch, self._asks = watch, asks

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self._asks and self.calls == 3:
            self._watch.stop.request("enough")
        return rows


def evaluated(joined: World, count: int, asking: int | None, lockstep: bool) -> tuple[int, int | None]:
    """Forward passes of this rank, and samples in the result, if there is one. Rank `asking` wants to stop."""
    task = toy.Toy({"validation": count}, {})
    watch = Watch(place(joined.rank, joined.size), Stop(None))
    model = Counting(watch, joined.rank == asking)
    result = evaluate(
        joined,
        task,
        model,
        task.validation_samples(),
        count=count,
        micro=2,
        workers=0,
        precision=torch.float32,
        lockstep=lockstep,
        watch=watch,
    )
    return model.calls, result.samples if result is not None else None


@pytest.mark.ranks(3)
def test_ranks_give_up_an_evaluation_in_the_same_round(ranks: Ranks) -> None:
    """17 samples: 6, 6, 5 in three micro batches each; 31: 11, 10, 10 in 6, 5 and 5. The wish of the third round
    is sent with the fourth, and known in the fifth; three are over before that.
    """
    assert ranks(3, evaluated, 17, 2, False) == [(3, 17)] * 3
    assert ranks(3, evaluated, 37, 2, False) == [(5, None)] * 3
    assert ranks(3, evaluated, 31, None, False) == [(6, 31), (5, 31), (5, 31)]
    assert ranks(3, evaluated, 31, None, True) == [(6, 31)] * 3


@pytest.mark.ranks(2)
def test_restart_after_the_clean_end_trains_nothing(tmp_path: Path) -> None:
    """A rank that fails after the marker: torchrun starts all anew, and they end with code 0 at once."""
    run = Run.create(tmp_path / "run", **{**TROUBLED, "train__steps": 3})
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import atexit, os\n"
        "flag = os.environ.get('DIES')\n"
        "if flag and os.environ.get('RANK') == '1' and not os.path.exists(flag):\n"
        "    atexit.register(lambda: (open(flag, 'w').close(), os._exit(3)))\n"
    )
    path = ":".join([str(tmp_path / "site"), str(ROOT), str(HERE.parent)])
    with launched(run, 2, "--max-restarts=1", PYTHONPATH=path, DIES=str(tmp_path / "died")) as job:
        assert job.wait() == 0, job.stderr
        assert job.stdout.count("attempt 0 is already over: nothing to do") == 1
    assert (tmp_path / "died").exists()
    assert len(run.events("started")) == 1 and run.marker()["state"] == "done"


@pytest.mark.long
@pytest.mark.ranks(2)
def test_after_sigterm_a_rank_whose_peer_is_stuck_ends(tmp_path: Path) -> None:
    """What torchrun does where one of several nodes is gone: SIGTERM to ranks that wait in a collective for ever."""
    data = {"trouble": trouble("sleep")}
    run = Run.create(tmp_path / "run", **TROUBLED, train__data=data, timeouts__collective=600)
    with launched(run, 2) as job:
        job.until_step(4)
        job.send(0, signal.SIGTERM)
        # torchrun then ends the other one, which is asleep in its own way, by the same rule.
        assert job.wait() == 1
    assert "rank 0 on here: error: no progress in step for" in job.stderr
    assert "s after SIGTERM: exiting without saving" in job.stderr
    assert not run.events("finished") and not (run.root / "markers").exists()


@pytest.mark.ranks(2)
def test_ranks_do_not_outlive_torchrun(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", **{**TROUBLED, "train__steps": 100000}, train__data={"pace": 0.01})
    with launched(run, 2) as job:
        job.until_step(3)
        job.agent.kill()
        job.agent.wait()
        until(lambda: not any(map(alive, job.ranks().values())), "end of the orphans")
    assert "torchrun has exited: exiting without saving" in job.stderr


def test_marker(tmp_path: Path) -> None:
    path = tmp_path / "markers" / "attempt-000.json"
    assert not marker.ended(path)
    marker.write(path, 0, Marker("done"))
    assert marker.ended(path)
    path.write_text("{")
    assert marker.ended(path)


def test_the_first_reason_stays(tmp_path: Path) -> None:
    stop = Stop(tmp_path / "stop", interval=0.0)
    assert not stop.wanted() and stop.reason() is None
    (tmp_path / "stop").write_text(StopRequest("time limit").text())
    assert stop.wanted() and stop.reason() == "time limit"
    (tmp_path / "stop").unlink()
    assert stop.wanted() and stop.reason() == "stop file"
    stop.request("a")
    stop.request("b")
    assert stop.reason() == "a"


def test_an_agent_takes_the_echo_of_a_sigterm_for_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm and Apptainer both send it; at a second one, torchrun leaves its ranks while they save."""
    taken: list[int] = []
    monkeypatch.setattr(api, "_terminate_process_handler", lambda number, frame: taken.append(number))
    torch_private.take_echoes_for_one(0.5)
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        api._terminate_process_handler(number, None)
    time.sleep(0.6)
    api._terminate_process_handler(signal.SIGTERM, None)
    assert taken == [signal.SIGTERM, signal.SIGINT, signal.SIGTERM]


def test_an_agent_kills_a_rank_that_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would not take the SIGTERM. Only processes of the agent's own: a number may be somebody else's by now."""
    closed: list[tuple[object, ...]] = []
    monkeypatch.setattr(api.PContext, "close", lambda self, *words: closed.append(words))
    torch_private.kill_stopped_ranks()
    stops = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"]
    waits = f"import subprocess; p = subprocess.Popen({stops}); print(p.pid, flush=True); p.wait()"
    with (
        subprocess.Popen(stops) as stopped,
        subprocess.Popen(["sleep", "100"]) as runs,
        subprocess.Popen([sys.executable, "-c", waits], stdout=subprocess.PIPE, text=True) as parent,
    ):
        other = int(parent.stdout.readline()) if parent.stdout else 0
        until(lambda: [stat_fields(pid)[0] for pid in (stopped.pid, other)] == ["T", "T"], "both are stopped")
        context = SimpleNamespace(pids=lambda: dict(enumerate([stopped.pid, runs.pid, other])))
        api.PContext.close(context, signal.SIGTERM)  # type: ignore[arg-type]
        assert stopped.wait(10) == -signal.SIGKILL and closed == [(signal.SIGTERM,)]
        assert runs.poll() is None and stat_fields(other)[0] == "T"
        os.kill(other, signal.SIGKILL)
        runs.kill()


SIGTERMS = """
import os, signal, sys, time
from slurmddp.runtime.watch import watch
from slurmddp.runtime.environment import Environment
from slurmddp.runtime.watch.stop import Stop

assert "torch" not in sys.modules, "signals have to be taken before something takes seconds to import"
watch.ECHO = 0.5
stop = Stop(None)
here = Environment(rank=0, local_rank=0, local_world=1, world=1, attempt=0, node="here", stop_file=None)
own = watch.Watch(here, stop)
own.install(parent=False)
if sys.argv[1] == "training":
    own.enter("step", 1)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(1)
print("asked", stop.reason(), flush=True)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(100)
"""


@pytest.mark.parametrize(
    ("when", "said", "message"),
    [
        ("training", "asked SIGTERM received by rank 0 on here\n", "second SIGTERM: exiting without saving"),
        ("joining", "", "SIGTERM before the rendezvous: exiting"),
    ],
)
def test_a_second_sigterm_ends_at_once_and_an_echo_does_not(when: str, said: str, message: str) -> None:
    command = [sys.executable, "-c", SIGTERMS, when]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (result.returncode, result.stdout) == (1, said), result.stderr
    assert result.stderr == f"rank 0 on here: error: {message}\n"
