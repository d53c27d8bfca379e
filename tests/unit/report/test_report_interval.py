"""The suggested interval between checkpoints: the published figures, and what is taken from events."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from slurmddp.job.job import Checkpoint
from slurmddp.job.types import seconds_of
from slurmddp.report import interval
from slurmddp.report.interval import History
from slurmddp.run.layout import RunFolder
from tests.checkpoints import make_run

MINUTE, HOUR = 60.0, 3600.0


@pytest.mark.parametrize(("between", "published"), [(24 * HOUR, 117), (6 * HOUR, 57), (15 * MINUTE, 9.1)])
def test_the_figures_of_dalys_paper(between: float, published: float) -> None:
    """Figures 3 to 5 there: a dump takes 5 minutes; the optimum in minutes."""
    minutes = interval.best_interval(5 * MINUTE, between) / MINUTE
    assert round(minutes, 1 if published < 10 else 0) == published


@pytest.mark.parametrize(("stall", "between"), [(0.5, 1000.0), (30.0, 5000.0), (300.0, 6000.0)])
def test_it_loses_least_time(stall: float, between: float) -> None:
    """Against the expected wall time under Poisson failures, by Daly's complete model (restart 0)."""

    def cost(work: float) -> float:
        return between * math.expm1((work + stall) / between) / work

    best = interval.best_interval(stall, between)
    least = min(cost(best * factor) for factor in (0.5, 0.7, 0.9, 1.0, 1.1, 1.4, 2.0))
    assert cost(best) <= least * 1.0005


def test_a_simulated_month_agrees() -> None:
    """Young's and Daly's assumption by hand: failures at random, work since the last checkpoint is done again."""

    def wall(work: float, stall: float, between: float) -> float:
        dice = random.Random(1)
        total = done = 0.0
        while done < 400 * HOUR:
            lives = dice.expovariate(1 / between)
            saves = int(lives // (work + stall))
            done += saves * work
            total += lives
        return total / done

    best = interval.best_interval(20.0, 2 * HOUR)
    assert wall(best, 20.0, 2 * HOUR) < min(wall(best / 4, 20.0, 2 * HOUR), wall(best * 4, 20.0, 2 * HOUR))


def test_a_stall_that_is_longer_than_the_time_between_failures() -> None:
    assert interval.best_interval(100.0, 50.0) == 50.0
    assert interval.best_interval(0.0, 50.0) == 0.0


def test_failures_are_those_of_all_nodes() -> None:
    seen = History(runs=5, stall=0.4, write=9, failures=2, node_hours=300)
    assert interval.between_failures(seen, 1) == pytest.approx((3700 * 150**2) ** (1 / 3) * HOUR)
    assert interval.between_failures(seen, 10) == pytest.approx(interval.between_failures(seen, 1) / 10)


def test_one_failure_in_a_short_run_says_little_and_many_say_all() -> None:
    once = History(runs=1, stall=0.4, write=1, failures=1, node_hours=0.001)
    assert interval.between_failures(once, 1) == pytest.approx((3700 * 0.001) ** 0.5 * HOUR)
    always = History(runs=9, stall=0.4, write=1, failures=1000, node_hours=5000)
    assert interval.between_failures(always, 1) == pytest.approx(5 * HOUR, rel=0.01)


def test_no_interval_is_shorter_than_a_minute() -> None:
    line = interval.interval_line(History(1, 0.001, 0.01, 1, 0.001), 64, Checkpoint())
    assert line.startswith("checkpoint interval 60s suggested")


def test_without_failures_the_usual_rate_until_more_was_seen() -> None:
    quiet = History(runs=1, stall=0.4, write=9, failures=0, node_hours=2)
    assert interval.between_failures(quiet, 4) == 3700 / 4 * HOUR
    proven = History(runs=9, stall=0.4, write=9, failures=0, node_hours=30_000)
    assert interval.between_failures(proven, 4) == 10_000 / 4 * HOUR


@pytest.mark.parametrize(
    ("history", "line"),
    [
        (
            History(5, 0.4, 3.0, 1, 310),
            "checkpoint interval 15m suggested (stall 0.4 s, 1 failure in 310 node-hours over 5 runs,"
            " assuming one per 1,071 node-hours; now 30m)",
        ),
        (
            History(1, 0.4, 3.0, 0, 2),
            "checkpoint interval 27m suggested (stall 0.4 s, no failure in 2.0 node-hours over 1 run,"
            " assuming one per 3,700 node-hours; now 30m)",
        ),
        (
            History(2, 0.4, 4000.0, 30, 2000),  # one save at a time
            "checkpoint interval 67m suggested (stall 0.4 s, 30 failures in 2,000 node-hours over 2 runs,"
            " assuming one per 76 node-hours; now 30m)",
        ),
    ],
)
def test_the_line(history: History, line: str) -> None:
    assert interval.interval_line(history, 4, Checkpoint()) == line


def test_what_is_now() -> None:
    def now(**values: Any) -> str:
        line = interval.interval_line(History(1, 1, 1, 1, 1), 1, Checkpoint(**values))
        return line.split("; now ")[1].removesuffix(")")

    assert now(interval=None, every_steps=500) == "every 500 steps"
    assert now(interval="2h", every_steps=7) == "2h or every 7 steps"
    assert now(interval=None) == "only at the end"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "1s"), (45.4, "45s"), (89, "89s"), (91, "2m"), (60 * 89, "89m"), (60 * 90, "1h30m"), (7300, "2h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert interval.duration(seconds) == text


@pytest.mark.parametrize("seconds", [0.2, 45, 91, 3600, 5400, 5401, 7300, 86400, 10**6])
def test_the_suggested_interval_is_one_that_a_job_file_takes(seconds: float) -> None:
    assert seconds_of(interval.duration(seconds)) == pytest.approx(seconds, rel=0.35, abs=1)


# --- what runs measured


def history(tmp_path: Path, *events: dict[str, Any], silent: bool = True) -> History | None:
    folder = make_run(tmp_path / "run")
    folder.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    later = interval.SILENCE * (2 if silent else 0)
    return interval.measured([folder, RunFolder(tmp_path / "gone")], folder.events.stat().st_mtime + later)


def attempt(number: int, *events: dict[str, Any], nodes: int = 2, begin: float = 0) -> list[dict[str, Any]]:
    """An attempt that trains from second 100 on; `at`: seconds after `begin`."""
    opening = [
        {"event": "job_started", "at": 0, "nodes": "node[1-2]"},
        {"event": "started", "at": 50, "nodes": nodes},
        {"event": "first_step", "at": 100},
    ]
    return [
        {**{key: value for key, value in event.items() if key != "at"}, "attempt": number, "time": begin + event["at"]}
        for event in [*opening, *events]
    ]


SAVED = {"event": "checkpoint_saved", "at": 1900, "seconds": 8.0, "stall": 0.5}
FINISHED = {"event": "finished", "at": 3700}
ENDED = {"event": "job_ended", "at": 3700, "exit_code": 1, "signal": "", "slurm_state": ""}


def test_a_clean_run(tmp_path: Path) -> None:
    assert history(tmp_path, *attempt(0, SAVED, FINISHED)) == History(1, 0.5, 8.0, 0, 2.0)


def test_before_stalls_were_measured_a_save_costs_all_its_time(tmp_path: Path) -> None:
    old = {key: value for key, value in SAVED.items() if key != "stall"}
    assert history(tmp_path, *attempt(0, old, FINISHED)) == History(1, 8.0, 8.0, 0, 2.0)


@pytest.mark.parametrize(
    ("end", "failures"),
    [
        ([ENDED], 1),
        ([{**ENDED, "slurm_state": "NODE_FAIL"}], 1),
        ([{**ENDED, "slurm_state": "TIMEOUT"}], 0),
        ([{**ENDED, "slurm_state": "CANCELLED by 1000"}], 0),
        ([{**ENDED, "signal": "TERM"}], 0),
        ([{"event": "error", "at": 3600, "kind": "NotFiniteError"}, ENDED], 0),
        ([{"event": "error", "at": 3600, "kind": "OSError"}, ENDED], 1),
        ([{"event": "cancel_requested", "at": 3600}, ENDED], 0),
        ([FINISHED, {**ENDED, "exit_code": 0}], 0),
        ([{"event": "evaluated", "at": 3700}], 1),  # silent ever since: it was killed
        ([{"event": "started", "at": 2000}, FINISHED], 1),  # torchrun started the ranks anew
    ],
)
def test_failures(tmp_path: Path, end: list[dict[str, Any]], failures: int) -> None:
    found = history(tmp_path, *attempt(0, SAVED, *end))
    assert found is not None
    assert (found.failures, found.node_hours) == (failures, 2.0)


def test_one_that_still_runs_has_not_failed_and_an_attempt_behind_it_has(tmp_path: Path) -> None:
    found = history(tmp_path, *attempt(0, SAVED), *attempt(1, SAVED, begin=5000), silent=False)
    assert found is not None
    assert (found.failures, found.node_hours) == (1, 2.0)


def test_nothing_measured(tmp_path: Path) -> None:
    assert history(tmp_path) is None


def test_one_that_ended_before_it_trained_says_nothing(tmp_path: Path) -> None:
    events = [event for event in attempt(0, ENDED) if event["event"] != "first_step"]
    assert history(tmp_path, *events) is None
