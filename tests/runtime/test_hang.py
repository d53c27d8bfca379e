"""Hangs: who did not arrive is found, everybody says where it is, and a restart goes on from the checkpoint."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmddp.records.rank_events import Error, Hang
from slurmddp.runtime.journal import Events
from slurmddp.runtime.watch.blame import Beat, Verdict, blame
from slurmddp.runtime.watch.heartbeat import Look
from slurmddp.runtime.watch.process_exit import stacks
from slurmddp.runtime.watch.progress import Patience, Progress

from .harness import Run
from .launched import alive, launched, until
from .test_stop import TROUBLED, trouble

HANG = {**TROUBLED, "timeouts__hang": 3, "timeouts__collective": 600}


def culprit(run: Run) -> tuple[list[int], str, str]:
    """Of the one hang: ranks, kind, phase."""
    (event,) = run.events("hang")
    assert event["nodes"] == ["here"] * len(event["ranks"])
    assert event["waited"] > event["deadline"] >= 3
    return event["ranks"], event["kind"], event["phase"]


@pytest.mark.long  # tests/cluster/test_training.py stops one, too
@pytest.mark.ranks(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_process_is_named(tmp_path: Path, rank: int) -> None:
    """Rank 0 hosts the heartbeats: no answer from it is an answer, too."""
    run = Run.create(tmp_path / "run", **{**HANG, "train__steps": 100000}, train__data={"pace": 0.02})
    with launched(run, 2) as job:
        job.until_step(4)
        job.send(rank, signal.SIGSTOP)
        until(lambda: run.events("hang"), "hang")
        stopped = job.ranks()[rank]
        # The other one ends it: torchrun would do so in 30 s.
        until(lambda: not alive(stopped), "end of the stopped one")
        assert job.wait() == 1
    assert culprit(run)[:2] == ([rank], "silent")
    (message,) = [line for line in job.stderr.splitlines() if "error: hang: " in line]
    assert f"rank {1 - rank} on here: error: hang: rank {rank} on here did not arrive and sends no heartbeat" in message
    assert f"rank {1 - rank} on here:   File " in job.stderr and f"rank {rank} on here:   File" not in job.stderr


def test_a_hang_that_another_rank_has_told_of_is_known(tmp_path: Path) -> None:
    """A rank that was suspended and goes on finds the others gone, and has not to blame them for it."""
    path, hang = tmp_path / "events.jsonl", Hang("behind", (1,), ("n2",), "step", 1, 2.0, 1.0)
    Events(path, attempt=0, node="n1", rank=0).write(hang)
    time.sleep(0.002)  # Events are told apart by milliseconds.
    started = [Events(path, attempt=attempt, node="n1", rank=1) for attempt in (0, 1)]
    assert not any(events.told(Hang) for events in started), "that was before they began, or of another attempt"
    Events(path, attempt=0, node="n2", rank=2).write(hang)
    with path.open("a") as cut:
        cut.write('{"event": "ha')
    assert [events.told(Hang) for events in started] == [True, False]
    assert not started[0].told(Error)


@pytest.mark.ranks(3)
def test_a_rank_that_never_comes_to_the_exchange_is_named(tmp_path: Path) -> None:
    """Rank 0 turns in a loop of its own, holding Python's lock as much as any code does."""
    run = Run.create(tmp_path / "run", **{**HANG, "batch__global": 3}, train__data={"trouble": trouble("spin", rank=0)})
    with launched(run, 3) as job:
        assert job.wait() == 1
    assert culprit(run) == ([0], "behind", "step")
    assert run.events("hang")[0]["step"] == 5
    (message,) = [line for line in job.stderr.splitlines() if "error: hang: " in line]
    assert "error: hang: rank 0 on here did not arrive, still in step at step 5: no progress for" in message
    for rank in range(3):
        assert f"rank {rank} on here: in step at step 5 for" in job.stderr
        assert f"rank {rank} on here:   File " in job.stderr
    (where,) = [line for line in job.stderr.splitlines() if "in turning_for_ever" in line]
    assert where.startswith("rank 0 on here:   File ")


@pytest.mark.long
@pytest.mark.ranks(2)
@pytest.mark.parametrize("workers", [0, 1])
def test_after_blocked_data_the_restart_goes_on(tmp_path: Path, workers: int) -> None:
    """The data of step 5 does not come on rank 1; in the second start it does."""
    data = {"trouble": trouble("sleep", call=5, where="data", once=str(tmp_path / "once"))}
    changes = {"train__steps": 8, "checkpoint__every_steps": 2, "train__workers": workers, "train__prefetch": 1}
    run = Run.create(tmp_path / "run", **{**HANG, **changes}, train__data=data)
    with launched(run, 2, "--max-restarts=1") as job:
        assert job.wait() == 0, job.stderr
    assert culprit(run) == ([1], "behind", "data")
    if not workers:
        (where,) = [line for line in job.stderr.splitlines() if "in sleeping_for_ever" in line]
        assert where.startswith("rank 1 on here:   File ")
    assert [event["event"] for event in run.lines("events.jsonl") if event["event"] in ("started", "finished")] == [
        "started",
        "started",
        "finished",
    ]
    assert run.marker()["state"] == "done"
    # Rank 1 had the ids of 4 steps; all were done, and step 4 was saved: the second start goes on behind it.
    assert [line["step"] for line in run.lines("metrics.jsonl")] == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.long
@pytest.mark.ranks(2)
def test_after_a_kill_the_restart_goes_on(tmp_path: Path) -> None:
    """With a store of its own for each start (TORCH_DISABLE_SHARE_RDZV_TCP_STORE), every restart gets going."""
    data = {"trouble": trouble("SIGKILL", call=6, once=str(tmp_path / "once"))}
    changes = {"train__steps": 8, "checkpoint__every_steps": 2}
    run = Run.create(tmp_path / "run", **{**HANG, **changes}, train__data=data)
    with launched(run, 2, "--max-restarts=1") as job:
        assert job.wait() == 0, job.stderr
    assert not run.events("hang")
    assert [line["step"] for line in run.lines("metrics.jsonl")] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert run.marker()["state"] == "done"


@pytest.mark.long
@pytest.mark.ranks(2)
def test_a_quiet_run_gives_no_alarm(tmp_path: Path) -> None:
    """Longer than the deadline in all, with everything in it that takes time."""
    changes = {"train__steps": 30, "checkpoint__every_steps": 10, "train__evaluate__every_steps": 10}
    run = Run.create(tmp_path / "run", **{**HANG, **changes}, train__data={"pace": 0.15}, train__workers=1)
    with launched(run, 2) as job:
        assert job.wait() == 0, job.stderr
    assert not run.events("hang") and "all threads" not in job.stderr
    assert run.marker()["state"] == "done"


def beat(*, step: int = 5, phase: str = "step", late: bool = True, gone: bool = False, **groups: int) -> Beat:
    return Beat(1, "n", step, phase, groups, late=late and not gone, over=late and not gone, gone=gone)


@pytest.mark.parametrize(
    ("beats", "silent", "verdict"),
    [
        ([beat(w=207), beat(w=206)], [], ("behind", [1])),
        ([beat(w=207, late=False), beat(w=206, late=False)], [], None),
        # The one that is behind still computes, such as rank 0 in an evaluation.
        ([beat(w=206, late=False), beat(w=207)], [], None),
        ([beat(w=207), beat(w=207)], [], ("all", [])),
        ([beat(w=207), beat(w=207, late=False)], [], None),
        ([beat(w=207), beat(w=206)], [0], ("silent", [0])),
        ([beat(w=207)], [1], ("silent", [1])),
        # Rank 3 waits for rank 2 in one group, for which rank 1 waits in another one.
        ([beat(a=9), beat(a=9, b=4), beat(a=8, b=4), beat(b=3)], [], ("behind", [3])),
        # Each waits for the other.
        ([beat(a=2, b=1), beat(a=1, b=2)], [], ("behind", [0, 1])),
        # No groups that tell: the steps do.
        ([beat(step=7), beat(step=6)], [], ("behind", [1])),
        # One has exited: without joining, or with all that it had to do.
        ([beat(w=207), beat(w=206, gone=True)], [], ("behind", [1])),
        ([beat(w=207), beat(w=207, gone=True)], [1], None),
        ([beat()], [], ("behind", [0])),
        # The one that waits for data is on its way to the collective that the others are in.
        ([beat(w=7), beat(w=7, phase="data")], [], ("behind", [1])),
        ([beat(w=7, phase="data"), beat(w=7, phase="data")], [], ("all", [])),
        # Nothing was ever heard of it.
        ([beat(w=7)], [1], ("silent", [1])),
    ],
)  # fmt: skip
def test_who_did_not_join(beats: list[Beat], silent: list[int], verdict: tuple[str, list[int]] | None) -> None:
    judged = blame(dict(enumerate(beats)), silent)
    assert (judged and (judged.kind, judged.ranks)) == verdict


def test_a_verdict_says_where_the_culprit_was_last() -> None:
    waits = beat(w=40)
    assert blame(dict(enumerate([waits, beat(w=39, step=4, phase="data"), waits])), []) == Verdict(
        "behind", [1], "data", 4
    )
    assert blame({0: waits}, [1]) == Verdict("silent", [1], "start", 0)


def test_a_rank_is_silent_after_four_equal_readings() -> None:
    """And while one may be about to fall silent, nobody else is blamed."""
    look = Look()
    behind = Beat(9, "n", 5, "step", {"w": 39}, late=True, over=True)
    readings = [[Beat(number, "n", 5, "step", {"w": 40}, late=True, over=True), behind] for number in range(4)]
    verdicts = [look.read(reading) for reading in readings]
    assert verdicts == [None, None, None, Verdict("silent", [1], "step", 5)]


def test_deadlines_are_learned() -> None:
    progress = Progress()
    patience = Patience(progress, shortest=3, collective=100)
    assert patience.deadline() == 1800  # The start reads somebody's disk.
    progress.enter("step", 1)
    patience.pass_time(1)
    assert patience.deadline() == 100 and patience.waited == 0  # Nothing is known of steps yet.
    patience.pass_time(1)
    progress.enter("step", 2)
    patience.pass_time(1)
    assert patience.deadline() == 5
    patience.pass_time(5)
    assert not patience.over
    patience.pass_time(0.5)
    assert patience.over
    progress.enter("checkpoint")
    patience.pass_time(1)
    assert patience.deadline() == 1800 and not patience.over
    progress.enter("step", 3)
    patience.pass_time(1)
    assert patience.deadline() == 27.5  # Five times 5.5 seconds.
    patience.pass_time(90)
    progress.enter("step", 4)
    patience.pass_time(1)
    assert patience.deadline() == 100  # A collective may not take longer.


def test_following_an_iterator() -> None:
    progress = Progress()
    seen = []

    def noting() -> Iterator[int]:
        for item in range(2):
            seen.append(progress.state.phase)
            yield item

    progress.enter("step", 4)
    followed = progress.follow(noting())
    assert [next(followed), progress.state.phase, next(followed)] == [0, "step", 1]
    assert seen == ["data", "data"] and (progress.state.phase, progress.state.step) == ("step", 4)
    assert list(followed) == []


def test_stacks_name_the_thread_that_asks() -> None:
    lines = stacks("rank 3").splitlines()
    assert all(line.startswith("rank 3: ") for line in lines)
    assert any("in test_stacks_name_the_thread_that_asks" in line for line in lines)
