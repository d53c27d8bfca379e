"""What a run's time went into: from events and metrics lines to seconds that add up."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slurmddp.records.marker import Marker
from slurmddp.records.metrics import read
from slurmddp.records.submission import Submission
from slurmddp.report.goodput import goodput_dict, goodput_line, goodput_text, run_ledger
from slurmddp.run import metrics
from slurmddp.run import submission as submissions
from slurmddp.run.evidence import Evidence
from slurmddp.run.gate import own
from slurmddp.run.layout import RunFolder
from slurmddp.run.ledger import KINDS, Ledger, ledger
from tests.helpers import Result, typed

#: When the runs of these tests were submitted: their times are seconds after it.
ZERO = 1_700_000_000
SENT = Submission("7", "slurm", ("sbatch",), "2023-11-14T22:13:20+00:00", "login")

Record = dict[str, Any]


def event(time: float, name: str, attempt: int = 0, rank: int | None = 0, **facts: Any) -> Record:
    who = {} if rank is None else {"rank": rank}
    return {"time": ZERO + time, "event": name, "attempt": attempt, "node": "n1", **who, **facts}


def line(time: float, step: int, attempt: int = 0, **seconds: float) -> Record:
    parts = {"seconds": seconds} if seconds else {}
    return {"time": ZERO + time, "attempt": attempt, "step": step, "loss": 1.0, **parts}


def job(begin: float, end: float | None, *inside: Record, attempt: int = 0, code: int = 0) -> list[Record]:
    """The events of an attempt: the script's own around those of rank 0."""
    last = [] if end is None else [event(end, "job_ended", attempt, None, exit_code=code, signal="")]
    return [event(begin, "job_started", attempt, None, job_id="7"), *inside, *last]


def account(
    events: list[Record],
    rows: list[Record] | None = None,
    *,
    now: float | None = None,
    script: bool = False,
    sent: Submission | None = SENT,
    markers: Mapping[int, Marker] | None = None,
) -> Ledger:
    moment = None if now is None else ZERO + now
    lines = [told for row in rows or [] if (told := read(row))]
    found = ledger(Evidence(sent, markers, typed(*events)), lines, script=script, now=moment)
    assert found is not None
    assert sum(found.spent.values()) == found.wall
    assert min(found.spent.values()) >= 0
    return found


def spent(found: Ledger) -> dict[str, float]:
    """Seconds by kind, without those that are zero."""
    return {kind: time / 1000 for kind, time in found.spent.items() if time}


# --- one attempt


def test_a_run_whose_ranks_tell_everything() -> None:
    events = job(
        60, 300,
        event(80, "rank_started", seconds=5), event(85, "started"), event(88, "resumed", step=100),
        event(90, "ready", step=100),
        event(101, "first_step", step=101, seconds=26),
        event(200, "checkpoint_saved", step=150, seconds=30),
        event(290, "timing", seconds={"data": 16, "forward": 141, "network": 6, "checkpoint": 10.5, "evaluation": 20,
                                      "other": 1}),
        event(291, "finished", step=200),
    )  # fmt: skip
    rows = [
        line(101, 101, data=2, forward=3, backward=3, network=1, optimizer=1, other=1),
        line(210, 150, data=6, forward=53, backward=33, overlap=10, network=6, optimizer=5, checkpoint=1.5, other=1),
        line(260, 200, data=16, forward=93, backward=33, overlap=10, network=6, optimizer=5, checkpoint=1.5, other=1),
    ]
    found = account(events, rows)
    assert spent(found) == {
        "queue": 60, "image": 15, "init": 15, "training": 7 + 94 + 40, "network": 1 + 5, "data": 16,
        "checkpoint": 10.5, "evaluation": 20, "other": 1 + 4.5 + 1 + 1 + 9,
    }  # fmt: skip
    assert found.goodput == pytest.approx(141 / 300)
    assert (found.attempts, found.rank_starts, found.failures) == (1, 1, 0)


def test_a_background_save_costs_its_stall_only() -> None:
    events = job(
        0, 110, event(10, "rank_started"), event(20, "ready", step=0),
        event(60, "checkpoint_saved", step=5, seconds=30, stall=0.25), event(105, "finished", step=9),
    )  # fmt: skip
    found = account(events, [line(100, 9)])
    assert found.spent["checkpoint"] == 250
    assert found.spent["training"] == 79_750


def test_the_measurement_of_the_network_is_preflight_too() -> None:
    checks = [event(10, "preflight", 0, None, seconds=8), event(25, "network", 0, None, seconds=12)]
    assert spent(account(job(0, 50, *checks, event(30, "rank_started")))) == {"image": 10, "preflight": 20, "other": 20}


def test_where_nothing_tells_when_the_ranks_started_it_is_all_init() -> None:
    events = job(0, 50, event(20, "started"), event(30, "ready", step=0), event(33, "first_step", step=1, seconds=12))
    assert spent(account(events)) == {"init": 30, "other": 20}


def test_parts_longer_than_their_time_are_shortened_alike() -> None:
    events = job(0, 30, event(0, "rank_started"), event(10, "ready", step=0), event(20, "finished", step=5))
    found = account(events, [line(20, 5, data=10, forward=30)])
    assert spent(found) == {"init": 10, "data": 2.5, "training": 7.5, "other": 10}


# --- going, waiting, never begun


def test_a_run_that_waits() -> None:
    found = account([], now=33)
    assert spent(found) == {"queue": 33}
    assert found.goodput == 0
    assert goodput_line(found) is None


@pytest.mark.parametrize(
    ("inside", "kind"),
    [
        ([], "image"),
        ([event(20, "rank_started")], "init"),
        ([event(20, "rank_started"), event(20, "ready", step=0)], "training"),
        ([event(20, "rank_started"), event(20, "error")], "restart"),
        ([event(20, "rank_started"), event(20, "finished")], "other"),
    ],
)
def test_the_time_up_to_now_is_what_the_run_is_at(inside: list[Record], kind: str) -> None:
    assert spent(account(job(10, None, *inside), now=50))[kind] >= 30


def test_cancelled_in_the_queue() -> None:
    assert spent(account([{"time": ZERO + 12, "event": "cancel_requested", "job_id": "7"}])) == {"queue": 12}


def test_a_run_that_was_never_submitted_has_no_ledger() -> None:
    assert ledger(Evidence(), [], script=False, now=ZERO) is None


def test_a_script_of_the_users_own() -> None:
    found = account(job(30, 100) + job(250, 300, attempt=1), script=True)
    assert spent(found) == {"queue": 30, "run": 120, "requeue": 150}
    assert found.goodput is None


def observed(begin: float, end: float, step: int, attempt: int = 0, **seconds: float) -> tuple[list[Record], Record]:
    """The ranks of a script, which trains from 20 s after `begin` to 10 s before `end`: first at `step`."""
    told = [event(begin, "rank_started", attempt, seconds=5), event(begin + 20, "first_step", attempt, step=step)]
    return told, line(end - 10, step + 99, attempt, **seconds)


def test_an_observed_script_has_a_goodput() -> None:
    told, row = observed(30, 160, 1, compute=80, network=15, data=4, checkpoint=1)
    found = account(job(10, 160, *told), [row], script=True)
    expected = {"queue": 10, "image": 15, "init": 25, "training": 80, "network": 15, "data": 4, "checkpoint": 1}
    assert spent(found) == {**expected, "other": 10}
    assert found.goodput == 0.5
    assert spent(account(job(10, None, *told), [row], script=True, now=160)) == {**expected, "training": 90}


def test_time_that_was_not_measured_is_not_called_training() -> None:
    told, row = observed(30, 160, 1, unmeasured=90, data=10)
    found = account(job(10, 160, *told), [row], script=True)
    assert found.spent["run"] == 90_000 and found.spent["training"] == 0 and found.goodput is None


@pytest.mark.parametrize(
    ("step", "saved", "expected"),
    [(81, [], {"lost": 20, "training": 160}), (81, [80], {"lost": 20, "training": 160}), (1, [], {"training": 80})],
)
def test_a_script_that_begins_at_step_1_again_may_have_resumed(
    step: int, saved: list[int], expected: dict[str, float]
) -> None:
    """Adam's state knows its steps, that of SGD does not."""
    first, row = observed(20, 150, 1, compute=100)
    saves = [event(140, "checkpoint_saved", step=at, seconds=0.0) for at in saved]
    then, again = observed(220, 350, step, 1, compute=80)
    found = account(job(10, 150, *first, *saves, code=1) + job(200, 350, *then, attempt=1), [row, again], script=True)
    assert {kind: found.spent[kind] / 1000 for kind in ("lost", "training")} == {"lost": 0, **expected}, spent(found)
    assert found.spent["run"] == (100_000 if step == 1 else 0)


@pytest.mark.parametrize(
    ("told", "expected", "recovered"),
    [
        ({"how": "from zero", "step": 1}, {"lost": 100, "training": 80}, 0),
        ({"how": "went on", "step": 51}, {"lost": 50, "training": 130}, 1),
        # The thread of the observer came late: the first step that it saw was no longer the first.
        ({"how": "unknown", "step": None}, {"run": 100, "training": 80}, 0),
        (None, {"lost": 90, "training": 90}, 0),
    ],
)
def test_what_a_script_went_on_from(told: Record | None, expected: dict[str, float], recovered: int) -> None:
    """Its steps before are lost, kept as far as it loaded them, or unknown. It recovered only if it went on."""
    first, row = observed(20, 150, 1, compute=100)
    then, again = observed(220, 350, 11, 1, compute=80)
    then += [event(241, "restarted", 1, **told)] if told else []
    found = account(job(10, 150, *first, code=1) + job(200, 350, *then, attempt=1), [row, again], script=True)
    kinds = {kind: found.spent[kind] / 1000 for kind in ("lost", "training", "run") if found.spent[kind]}
    assert kinds == expected and found.recovered == recovered
    if told and told["how"] == "from zero":
        unmeasured = [line(150 - 10, 100, unmeasured=100), again]
        events = job(10, 150, *first, code=1) + job(200, 350, *then, attempt=1)
        assert account(events, unmeasured, script=True).spent["lost"] == 100_000


def test_steps_before_a_start_from_zero_are_lost_whatever_came_later() -> None:
    first, row = observed(20, 150, 1, compute=100)
    zero, again = observed(220, 350, 1, 1, compute=80)
    zero.append(event(241, "restarted", 1, how="from zero", step=1))
    later, last = observed(420, 550, 1, 2, compute=80)
    later.append(event(441, "restarted", 2, how="unknown", step=None))
    events = [*job(10, 150, *first, code=1), *job(200, 350, *zero, attempt=1, code=1)]
    found = account([*events, *job(400, 550, *later, attempt=2)], [row, again, last], script=True)
    assert {kind: found.spent[kind] / 1000 for kind in ("lost", "run", "training")} == {
        "lost": 100, "run": 80, "training": 80,
    }  # fmt: skip


def test_a_cancelled_script_has_lost_nothing_that_anybody_knows() -> None:
    told, row = observed(20, 150, 1, compute=100)
    assert account(job(10, 150, *told, code=143), [row], script=True).spent["training"] == 100_000
    saved = event(140, "checkpoint_saved", step=50, seconds=0.0)
    assert account(job(10, 150, *told, saved, code=143), [row], script=True).spent["lost"] == 50_000


@pytest.mark.parametrize(("code", "failures"), [(0, 0), (1, 1)])
def test_the_exit_code_of_a_script_says_whether_it_failed(code: int, failures: int) -> None:
    """slurmddp tells of its start; the script need not tell of its end."""
    found = account(job(30, 100, event(40, "rank_started", seconds=1.0), code=code), script=True)
    assert (found.rank_starts, found.failures) == (1, failures)


def test_an_attempt_that_never_reached_its_ranks() -> None:
    assert spent(account(job(10, 25, code=1))) == {"queue": 10, "image": 15}


# --- lost work and restarts


def launch(at: float, resumed: int, attempt: int = 0) -> list[Record]:
    """The events of ranks that start at `at` and are ready 10 seconds later."""
    told = [event(at + 5, "started", attempt)]
    if resumed:
        told.append(event(at + 8, "resumed", attempt, step=resumed))
    return [event(at, "rank_started", attempt), *told, event(at + 10, "ready", attempt, step=resumed)]


@pytest.mark.parametrize("script", [False, True])
@pytest.mark.parametrize("ended_by", ["cancelled", "time limit", "preemption", ""])
def test_a_start_that_we_ended_has_not_failed(ended_by: str, script: bool) -> None:
    end = event(100, "attempt_ended", 0, None, exit_code=1, decision="stopped", ended_by=ended_by)
    assert account(job(0, 101, *launch(0, 0), end, code=1), script=script).failures == int(not ended_by)


def test_a_start_that_was_killed_with_its_job_by_a_cancel_has_not_failed() -> None:
    events = job(0, None, *launch(0, 0))
    assert account(events).failures == 1
    assert account([*events, event(90, "cancel_requested", rank=None)]).failures == 0
    assert account([*events, event(90, "cancel_requested", rank=None), event(91, "error")]).failures == 1


@pytest.mark.parametrize(("until", "code", "recovered"), [(147, 1, 0), (148, 1, 1), (147, 0, 1)])
def test_a_script_has_recovered_once_it_is_behind_the_last_step(until: int, code: int, recovered: int) -> None:
    """Or once it has done its work: the rank may have died behind its last step."""
    events = job(
        0, 300,
        *launch(0, 0), event(60, "first_step", step=1), *launch(100, 0), event(120, "first_step", step=51),
        event(121, "restarted", how="went on", step=51), code=code,
    )  # fmt: skip
    found = account(events, [line(90, 147, forward=1), line(290, until, forward=1)], script=True)
    assert found.recovered == recovered


def test_steps_after_the_checkpoint_that_was_resumed_from_are_lost() -> None:
    events = [
        *job(0, None, *launch(0, 0), event(50, "checkpoint_saved", step=40, seconds=0)),
        *job(200, 300, *launch(200, 40, 1), event(290, "finished", 1, step=100), attempt=1),
    ]
    rows = [line(60, 50, data=10, forward=40), line(110, 100, data=20, forward=80), line(290, 100, 1, forward=80)]
    found = account(events, rows)
    # A fifth of the first stretch (steps 41 to 50) and all of the second.
    assert spent(found) == {"init": 20, "training": 32 + 80, "data": 8, "lost": 60, "restart": 90, "other": 10}
    assert (found.attempts, found.rank_starts, found.failures) == (2, 2, 1)


def test_ranks_restarted_in_place_share_the_attempt() -> None:
    events = job(
        0, 200,
        *launch(0, 0), event(62, "error"), *launch(80, 20), event(190, "finished", step=60),
    )  # fmt: skip
    rows = [line(30, 20), line(60, 50), line(190, 60)]
    found = account(events, rows)
    # 30 s of 20 -> 50, and the 2 s up to the error; the second launch trains from 90 on.
    assert spent(found) == {"init": 20, "training": 20 + 100, "lost": 30 + 2, "restart": 18, "other": 10}
    assert (found.attempts, found.rank_starts, found.failures) == (1, 2, 1)


@pytest.mark.parametrize(("name", "kind", "rest"), [("error", "restart", 0), ("hang", "hang", 10_000)])
def test_a_hang_is_not_taken_for_lost_steps(name: str, kind: str, rest: int) -> None:
    events = job(0, 900, *launch(0, 0), event(700, name), *launch(710, 20), event(890, "finished", step=60))
    found = account(events, [line(20, 10), line(30, 20), line(890, 60)])
    assert found.spent["lost"] == 10_000
    assert found.spent[kind] == 670_000 - rest
    assert found.spent["restart"] == rest or kind == "restart"


@pytest.mark.parametrize("skew", [-1000, 0, 1000])
def test_a_hang_of_rank_0_is_told_by_another_rank_with_its_own_clock(skew: float) -> None:
    hang = event(400 + skew, "hang", rank=3)
    alone = account(job(0, 420, *launch(0, 0), hang, code=1), [line(20, 10), line(30, 20)])
    assert alone.spent["hang"] == {-1000: 0, 0: 360_000, 1000: 380_000}[skew]
    assert alone.failures == 1
    events = job(0, 900, *launch(0, 0), hang, *launch(410, 20), event(890, "finished", step=60))
    followed = account(events, [line(20, 10), line(30, 20), line(890, 60)])
    assert sum(followed.spent[kind] for kind in ("lost", "hang", "restart")) == 380_000
    assert followed.spent["training"] == 10_000 + 10_000 + 470_000


def test_a_checkpoint_that_was_refused_later_loses_what_came_after_the_older_one() -> None:
    events = [
        *job(0, 70, *launch(0, 0), event(60, "finished", step=50)),
        *job(100, 170, *launch(100, 50, 1), attempt=1, code=1),
        *job(200, 270, *launch(200, 25, 2), event(260, "finished", 2, step=50), attempt=2),
    ]
    rows = [line(60, 50), line(160, 100, 1), line(260, 50, 2)]
    found = account(events, rows)
    assert found.spent["lost"] == 25_000 + 50_000
    assert found.spent["training"] == 25_000 + 50_000


def test_ranks_that_failed_for_good_lose_what_no_checkpoint_has() -> None:
    events = job(0, 80, *launch(0, 0), event(50, "checkpoint_saved", step=40, seconds=0), code=1)
    found = account(events, [line(50, 40), line(60, 50)])
    assert spent(found) == {"init": 10, "training": 40, "lost": 10, "other": 20}


def test_a_clean_stop_loses_nothing_even_where_only_the_marker_tells() -> None:
    events, rows = job(0, 80, *launch(0, 0)), [line(60, 50)]
    assert account(events, rows).spent["lost"] == 50_000
    found = account(events, rows, markers={0: Marker("stopped", step=50)})
    assert found.spent["lost"] == 0
    assert found.failures == 0


@pytest.mark.parametrize(("code", "more"), [(1, []), (0, [{"time": ZERO + 79, "event": "requeued", "how": "requeue"}])])
def test_waiting_after_a_requeue(code: int, more: list[Record]) -> None:
    events = job(0, 80, *launch(0, 0), event(70, "finished", step=9), code=code)
    assert account([*events, *more], [line(60, 9)], now=200).spent["requeue"] == 120_000


# --- several attempts in one job


def attempt(number: int, begin: float, end: float, *inside: Record, code: int = 1, checked: float = 3) -> list[Record]:
    """What job.sh writes of an attempt around what rank 0 tells: the check of the nodes began at `begin`."""
    told = [
        event(begin + checked, "preflight", number, None, seconds=checked, bad=""),
        event(begin + checked, "attempt_started", number, None, nodes="n[1-2]"),
    ]
    # The rank and node of the cause are not those of the writer.
    return [*told, *inside, event(end, "attempt_ended", number, 5, exit_code=code, cause="rank 5 on n2: boom")]


def test_attempts_in_one_job() -> None:
    finished = event(185, "finished", 2, step=90)
    events = [
        event(10, "job_started", 0, None),
        *attempt(0, 10, 75, *launch(15, 0), event(70, "error")),
        *attempt(1, 80, 90),  # its nodes failed the check
        *attempt(2, 95, 190, *launch(100, 40, 2), event(112, "first_step", 2, step=41), finished),
        event(200, "job_ended", 2, None, exit_code=0),
    ]  # fmt: skip
    rows = [line(35, 10), line(65, 40), line(184, 90, 2)]
    found = account(events, rows)
    assert spent(found) == {
        "queue": 10, "preflight": 9, "image": 2 + 7 + 2, "init": 10 + 10, "training": 40 + 74, "lost": 5,
        "restart": 5 + 5 + 5, "other": 1 + 5 + 10,
    }  # fmt: skip
    assert (found.jobs, found.attempts, found.rank_starts, found.failures) == (1, 3, 2, 1)
    assert [tuple(each) for each in found.recoveries] == [(2, 41, 47_000, True, True)]
    assert found.recovered == 1
    assert goodput_text(found, going=False).splitlines()[1] == "recovered once, in 0:00:47"


def test_a_stop_at_the_time_limit_is_no_failure() -> None:
    events = [
        *job(0, 80, *launch(0, 0), event(70, "stopping", step=9), event(75, "finished", step=9)),
        *job(300, 400, *launch(300, 9, 1), event(390, "finished", 1, step=20), attempt=1),
    ]
    found = account(events, [line(60, 9), line(330, 12, 1)])
    assert [tuple(each) for each in found.recoveries] == [(1, 12, 255_000, False, True)]
    assert (found.recovered, found.spent["requeue"]) == (0, 220_000)


def test_ranks_that_failed_before_a_step_are_part_of_the_gap() -> None:
    events = job(
        0, 300, *launch(0, 0), event(50, "error"), *launch(60, 20), event(75, "error"), *launch(90, 20),
        event(290, "finished", step=60),
    )  # fmt: skip
    found = account(events, [line(40, 30), line(120, 31), line(280, 60)])
    assert [tuple(each) for each in found.recoveries] == [(0, 31, 80_000, True, True)]


@pytest.mark.parametrize("told", [False, True])
def test_a_script_that_tells_no_steps_recovers_between_its_attempts(told: bool) -> None:
    """slurmddp tells of its starts; it did not in runs of older code."""
    starts = [[event(at, "rank_started", number, seconds=1)] * told for number, at in enumerate((20, 90))]
    events = [
        event(10, "job_started", 0, None),
        *attempt(0, 10, 75, *starts[0]),
        *attempt(1, 80, 190, *starts[1], code=0),
        event(195, "job_ended", 1, None, exit_code=0),
    ]
    found = account(events, script=True)
    assert spent(found) == {"queue": 10, "preflight": 6, "run": 62 + 107 + 5, "restart": 5}
    assert [tuple(each) for each in found.recoveries] == [(1, None, 5_000, True, None)]
    assert (found.rank_starts, found.failures) == ((2, 1) if told else (0, 0))


# --- clocks and damage


@pytest.mark.parametrize("skew", [-3600, -20, 20, 3600])
def test_another_clock_on_rank_0s_node_shifts_its_times_together(skew: float) -> None:
    inside = [*launch(15, 0), event(190, "finished", step=60)]
    moved = [{**told, "time": told["time"] + skew} for told in inside]
    found = account(job(10, 200, *moved), [line(180 + skew, 60)])
    assert found.spent["training"] == 155_000
    assert found.spent["init"] == 10_000


@pytest.mark.parametrize("skew", [-1000, 1000])
def test_another_clock_on_the_login_host_costs_no_training(skew: float) -> None:
    events = job(
        10 + skew, None, *(event(12 + skew + at, name, step=0) for at, name in ((0, "rank_started"), (5, "ready")))
    )
    found = account(events, [line(100 + skew, 60)], now=110)
    assert found.spent["training"] >= 83_000


def test_other_ranks_and_records_without_sound_times_are_left_out() -> None:
    events = job(
        0, 100, *launch(0, 0), event(3000, "error", rank=5), {"time": None, "event": "ready", "attempt": 0},
        {"event": "finished"}, {"time": float("nan"), "event": "finished", "attempt": 0, "rank": 0},
        {"time": ZERO + 1, "event": "rank_started", "attempt": "x"}, event(90, "finished", step=9),
    )  # fmt: skip
    rows = [line(50, 9), {"time": True, "attempt": 0, "step": 7}, {"step": 3}]
    assert spent(account(events, rows)) == {"init": 10, "training": 40, "other": 50}


_TIMES = st.one_of(st.floats(-5000, 5000), st.sampled_from([0.0, 1e-4, 1e11, -1e11, float("nan"), float("inf")]))
_STEPS = st.one_of(st.none(), st.integers(-5, 400), st.just("9"))
_SECONDS = st.one_of(
    st.none(),
    st.floats(allow_nan=True),
    st.dictionaries(st.sampled_from(["data", "forward", "checkpoint", "other", "new"]), st.floats(), max_size=4),
)
_NAMES = st.sampled_from([
    "job_started", "job_ended", "rank_started", "started", "resumed", "ready", "first_step", "preflight", "stopping",
    "checkpoint_saved", "evaluated", "timing", "finished", "error", "hang", "cancel_requested", "unheard_of",
    "attempt_started", "attempt_ended", "requeued", "node_excluded",
])  # fmt: skip
_RECORDS = st.fixed_dictionaries(
    {
        "time": _TIMES.map(lambda time: ZERO + time),
        "event": _NAMES,
        "attempt": st.one_of(st.integers(0, 2), st.none()),
    },
    optional={
        "step": _STEPS,
        "seconds": _SECONDS,
        "stall": _SECONDS,
        "rank": st.integers(0, 1),
        "exit_code": st.integers(-1, 2),
    },
)


@settings(max_examples=150, deadline=None)
@given(
    events=st.lists(_RECORDS, max_size=25),
    rows=st.lists(_RECORDS, max_size=10),
    now=st.one_of(st.none(), st.floats(-3000, 3000)),
    script=st.booleans(),
    marked=st.booleans(),
)
@example(events=[], rows=[], now=None, script=False, marked=False)
def test_whatever_was_written_every_millisecond_is_in_one_kind(
    events: list[Record], rows: list[Record], now: float | None, script: bool, marked: bool
) -> None:
    found = account(events, rows, now=now, script=script, markers={1: Marker("done")} if marked else None)
    assert set(found.spent) == set(KINDS)
    assert found.failures <= found.rank_starts
    assert all(each.milliseconds >= 0 for each in found.recoveries)
    assert 0 <= found.recovered <= len(found.recoveries)


@settings(max_examples=100, deadline=None)
@given(
    waits=st.lists(
        st.tuples(
            st.floats(0, 500),
            _NAMES.filter(lambda name: name not in ("job_ended", "attempt_ended")),
            _STEPS,
            _SECONDS,
        )
    ),
    rows=st.lists(st.tuples(st.floats(0, 5000), st.integers(0, 400), _SECONDS), max_size=10),
    over=st.booleans(),
)
def test_a_sequence_in_its_order_spans_from_submission_to_its_end(
    waits: list[tuple[float, str, Any, Any]], rows: list[tuple[float, int, Any]], over: bool
) -> None:
    time, attempt, events = 0.0, -1, []
    for wait, name, step, seconds in [(1.0, "job_started", None, None), *waits]:
        time += wait
        attempt += name == "job_started"
        events.append(event(time, name, attempt, step=step, seconds=seconds))
    lines = [{**line(at, step), "seconds": seconds} for at, step, seconds in sorted(rows, key=lambda row: row[0])]
    now = None if over else time + 1
    found = account(events, now=now)
    assert found.wall == pytest.approx(1000 * (time if now is None else now), abs=2)
    with_lines = account(events, lines, now=now)
    assert with_lines.begin == found.begin == 1000 * ZERO
    assert with_lines.end >= found.end


# --- what people and programs see


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run of the bundled entrypoint, restarted once; the last line of each file is torn."""
    path = RunFolder(tmp_path)
    path.job_json.write_text("{}")
    submissions.write(own(path, to="write"), SENT)
    events = [
        *job(720, None, *launch(720, 0), event(1000, "checkpoint_saved", step=40, seconds=2)),
        *job(1500, 11524, *launch(1500, 40, 1), event(11500, "finished", 1, step=1000), attempt=1),
    ]
    rows = [line(1000, 40), line(1400, 80), line(11500, 1000, 1)]
    path.events.write_text("".join(json.dumps(told) + "\n" for told in events) + '{"time": 17')
    path.metrics.write_text("".join(json.dumps(told) + "\n" for told in rows) + '{"time": 17000')
    return path


def test_the_line_of_status(folder: RunFolder) -> None:
    found = run_ledger(folder, going=False)
    shown = goodput_line(found)
    assert shown == "89 % of 3:12:04 (training 2:51:00, queue 0:12:00, lost 0:06:38, ...)"


def test_the_table_adds_up(folder: RunFolder) -> None:
    found = run_ledger(folder, going=False)
    assert found is not None
    head, recovered, _, titles, *rows, total = goodput_text(found, going=False).splitlines()
    assert recovered == "recovered once, in 2:48:20"
    assert (
        head == "goodput  89 % of 3:12:04: 2 starts of the job, 2 starts of the ranks, 1 of these failed or were killed"
    )
    assert titles.split()[:3] == ["KIND", "SECONDS", "SHARE"]
    assert round(sum(float(row.split()[1]) for row in rows), 3) == float(total.split()[1]) == 11524
    assert [row.split()[0] for row in rows] == [kind for kind in KINDS if found.spent[kind]]


def test_json_has_every_kind(folder: RunFolder) -> None:
    found = run_ledger(folder, going=True)
    assert found is not None
    told = json.loads(json.dumps(goodput_dict(found, going=True)))
    assert set(told["seconds"]) == set(KINDS)
    assert sum(round(1000 * each) for each in told["seconds"].values()) == round(1000 * told["wall_seconds"])
    assert told["going"] is True


def test_without_job_json_it_is_a_script_of_the_users_own(folder: RunFolder) -> None:
    folder.job_json.unlink()
    found = run_ledger(folder, going=False)
    assert found is not None
    assert found.goodput is None
    said = str(goodput_line(found))
    assert re.match(r"n/a \(\d:\d\d:\d\d of your own script were not measured\), 3:12:04 \(run ", said), said


def test_the_commands(folder: RunFolder, cli: Callable[..., Result]) -> None:
    folder.manifest.write_text("{}")
    submissions.write(own(folder, to="write"), SENT._replace(job_id="local-999999999-1", scheduler="local"))
    asked = cli("status", str(folder.path), "--time", "--json")
    assert asked.code == 0, asked.err
    told = json.loads(asked.out)
    assert told["run_id"] == folder.id
    assert told["going"] is False
    assert told["wall_seconds"] == 11524
    assert "goodput  89 % of 3:12:04" in cli("status", str(folder.path), "--time").out
    assert "goodput  89 % of 3:12:04" in cli("status", str(folder.path)).out


def test_a_long_file_says_the_same(
    folder: RunFolder, cli: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "SMALL", 0)
    folder.manifest.write_text("{}")
    submissions.write(own(folder, to="write"), SENT._replace(job_id="local-999999999-1", scheduler="local"))
    shown = cli("status", str(folder.path), "--time")
    assert "goodput  89 % of 3:12:04" in shown.out and shown.err == "", shown.err


def test_a_run_that_was_not_submitted_is_refused(folder: RunFolder, cli: Callable[..., Result]) -> None:
    folder.manifest.write_text("{}")
    for path in (folder.submission, folder.events, folder.metrics):
        path.unlink()
    asked = cli("status", str(folder.path), "--time")
    assert asked.code == 2
    assert "was never submitted" in asked.err
    assert "goodput" not in cli("status", str(folder.path)).out
