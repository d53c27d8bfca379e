"""The share of the time that trains: the model against simulated failures, and the table of `check --mtbf`."""

import json
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurmddp.commands.check import useful_share
from slurmddp.errors import UserError
from slurmddp.job.job import Checkpoint
from slurmddp.run.layout import RunFolder
from tests.checkpoints import make_run

HOUR = 3600.0


@pytest.mark.parametrize(("between", "recovery"), [(1.0, 60.0), (10.0, 600.0), (0.1, 30.0)])
def test_the_model_agrees_with_failures_at_random(between: float, recovery: float) -> None:
    """Failures also come while a job recovers. between: hours."""
    work, stall, dice = 600.0, 20.0, random.Random(7)
    total = done = 0.0
    for _ in range(20_000):
        left = recovery
        while True:  # a recovery that fails begins again
            lives = dice.expovariate(1 / (between * HOUR))
            if lives >= left:
                break
            total += lives
        saves = int((lives - left) // (work + stall))
        done += saves * work
        total += lives
    share = useful_share.useful_share(work, stall, recovery, between * HOUR)
    assert share == pytest.approx(done / total, rel=0.03)


def test_the_ends() -> None:
    assert useful_share.useful_share(600, 0, 0, 1e9) == pytest.approx(1, abs=1e-5)
    assert useful_share.useful_share(600, 60, 0, 1e12) == pytest.approx(600 / 660)
    assert useful_share.useful_share(6000, 60, 10, 1) == 0.0


def events(at: float, recovers: bool) -> list[dict[str, Any]]:
    """A run whose ranks fail at second 2000 and train again at 2042, or go on."""
    told: list[tuple[float, str, dict[str, Any]]] = [
        (0, "job_started", {"nodes": "node[1-2]"}), (50, "rank_started", {}), (100, "first_step", {"step": 1}),
        (1900, "checkpoint_saved", {"step": 90, "seconds": 8.0, "stall": 0.5}),
    ]  # fmt: skip
    if recovers:
        told += [(2000, "error", {}), (2030, "rank_started", {}), (2035, "resumed", {"step": 90}),
                 (2042, "first_step", {"step": 91})]  # fmt: skip
    told.append((3700, "finished", {"step": 200}))
    rank = {"rank": 0, "node": "node1"}
    return [
        {"event": event, "attempt": 0, "time": at + second, **({} if event == "job_started" else rank), **facts}
        for second, event, facts in told
    ]


def lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recovers: bool, hours: float = 3700, **checkpoint: Any
) -> list[str]:
    folder = make_run(tmp_path / "run")
    folder.events.write_text("".join(json.dumps(event) + "\n" for event in events(1e9, recovers)))
    monkeypatch.setattr(useful_share, "earlier_runs", lambda name: [folder, RunFolder(tmp_path / "gone")])
    plan: Any = SimpleNamespace(job=SimpleNamespace(name="gpt"), nodes=SimpleNamespace(max=4))
    return useful_share.useful_share_lines(plan, Checkpoint(**checkpoint), hours)


def test_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = lines(tmp_path, monkeypatch, recovers=True)
    print("\n".join(found))
    assert "each node fails once in 3,700 hours (saved every 30m; last column: best interval)" in found[0]
    rows = [row.split() for row in found[2:6]]
    assert [row[0] for row in rows] == ["4", "16", "64", "256"]
    assert [float(row[2]) for row in rows] == sorted((float(row[2]) for row in rows), reverse=True)
    assert all(float(row[5]) >= float(row[2]) for row in rows), "the best interval is not worse"
    assert found[-1].endswith("stalls training for 0.5 s and is written in 8 s; a recovery takes 142 s (1 seen)")


def test_what_99_percent_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each term that is told leads to 99 % if it alone changes, and not much more than that."""
    found = lines(tmp_path, monkeypatch, recovers=True, hours=500)
    goals = [line for line in found if line.startswith("  99.0 % on ")]
    below = [row.split() for row in found[2:6] if float(row.split()[5]) < 99]
    assert below and [line.split()[3] for line in goals] == [row[0] for row in below]
    print("\n".join(found))
    terms = useful_share._Terms(0.5, 8, 142, 500 * HOUR / 64)
    assert terms.share() < 0.99
    (line,) = (line for line in goals if " on 64 nodes " in line)
    recovery, every = re.findall(r"a recovery of (\d+) s \(now 142 s\) or a failure every (\S+) ", line)[0]
    assert (
        terms._replace(recovery=float(recovery) - 1).share()
        >= 0.99
        > terms._replace(recovery=float(recovery) + 1).share()
    )
    assert terms._replace(between=1.1 * terms.between).share() < 0.99 and every.endswith(("h", "m")), line


def test_without_a_recovery_a_start_counts_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = lines(tmp_path, monkeypatch, recovers=False, interval=None)
    assert "(checkpoint.interval is not set; last" in found[0]
    assert found[2].split()[2] == "-"
    assert "no recovery was seen, so a start counts as one: " in found[-1]


def test_without_a_measured_run_it_says_how_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(useful_share, "earlier_runs", lambda name: [])
    plan: Any = SimpleNamespace(job=SimpleNamespace(name="gpt"), nodes=SimpleNamespace(max=4))
    with pytest.raises(UserError, match="no earlier run of gpt has saved a checkpoint"):
        useful_share.useful_share_lines(plan, Checkpoint(), 3700)
