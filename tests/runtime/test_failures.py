"""The breaker: what is noted of starts that failed, and when a run is stopped for good."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurmddp.runtime.watch import failures
from tests.runtime.harness import PATIENCE, ROOT, Run, torchrun
from tests.runtime.test_ranks import expected_stream

LIMIT = {failures.LIMIT: "3"}
#: As node.sh sets it: in a store shared with the agent, ranks find the addresses of those from before a restart.
STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def starts(run: Path, attempt: int, *steps: int) -> list[str | None]:
    """What rank 0 hears as it starts, each start having come to one of these steps before it failed."""
    heard = []
    for step in steps:
        heard.append(failures.begin(run, attempt, LIMIT))
        progress = failures.ProgressFile(run / "progress", 1000)
        progress.tell(step)
    return heard


def test_three_starts_that_end_at_the_same_step_are_the_last(tmp_path: Path) -> None:
    *before, last = starts(tmp_path, 0, 57, 57, 57, 57)
    assert before == [None] * 3
    assert last == "3 starts in a row crashed before step 58"
    marker = json.loads((tmp_path / "markers/attempt-000.json").read_text())
    assert (marker["state"], marker["step"]) == ("no progress", 57)


def test_who_gets_further_goes_on(tmp_path: Path) -> None:
    assert starts(tmp_path, 0, 10, 11, 12, 12, 11) == [None] * 5
    assert (tmp_path / "failures").read_text() == "0 10\n0 11\n0 12\n0 12\n"


def test_a_start_that_gains_nothing_over_an_earlier_jobs_counts(tmp_path: Path) -> None:
    """That one ended at its time limit, at step 20."""
    (tmp_path / "best").write_text("20\n")
    *before, last = starts(tmp_path, 0, 17, 18, 19, 20)
    assert before == [None] * 3 and last == "3 starts in a row crashed before step 21"
    (tmp_path / "progress").write_text("9\n")  # a script whose steps may count anew
    failures.begin(tmp_path, 0, LIMIT)
    assert (tmp_path / "failures").read_text() == "0 20\n0 20\n0 20\n0 9\n"


def test_the_first_start_of_an_attempt_follows_no_failure_of_its_own(tmp_path: Path) -> None:
    """How an attempt ended is job.sh's to say: it may have been a lost node, or a stop."""
    for attempt in range(5):
        assert starts(tmp_path, attempt, 7) == [None]
    assert not (tmp_path / "failures").exists()


def test_without_a_limit_nothing_is_noted(tmp_path: Path) -> None:
    assert failures.begin(tmp_path, 0, {}) is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "x", "7.5", "12 of 20", "-3"])
def test_what_a_script_wrote_may_be_anything(tmp_path: Path, text: str) -> None:
    (tmp_path / "progress").write_text(text)
    for _ in range(2):
        failures.begin(tmp_path, 0, LIMIT)
    assert (tmp_path / "failures").read_text() == ("0 12\n" if text.startswith("12") else "0 0\n")


def test_progress_is_written_in_one_piece_and_not_too_often(tmp_path: Path) -> None:
    progress = failures.ProgressFile(tmp_path / "progress", 20, every=3600)
    for step in (1, 2, 3):
        progress.tell(step)
    assert (tmp_path / "progress").read_text() == "1 20\n"
    progress.flush()
    assert (tmp_path / "progress").read_text() == "3 20\n"


def begin(run: Path, rank: int) -> subprocess.CompletedProcess[str]:
    """A script of the user's own as torchrun starts it on a rank."""
    (run / "own.py").write_text("print('it ran')\n")
    environment = {**os.environ, **LIMIT, "PYTHONPATH": str(ROOT), "RANK": str(rank)}
    environment |= {"SLURMDDP_RUN": str(run), "SLURMDDP_ATTEMPT": "0", failures.FILE: str(run / "progress")}
    command = [sys.executable, "-m", "slurmddp.runtime.begin", str(run / "own.py")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)


def test_a_script_of_ones_own_is_kept_from_starting_a_fourth_time(tmp_path: Path) -> None:
    done = [begin(tmp_path, 0) for _ in range(4)]
    assert ["it ran" in each.stdout for each in done] == [True, True, True, False]
    assert done[3].returncode == 0 and "3 starts in a row crashed before step 1" in done[3].stderr
    other = begin(tmp_path, 1)  # It reads the marker.
    assert (other.returncode, other.stdout, other.stderr) == (0, "", "")


@pytest.mark.ranks(2)
def test_what_the_ranks_would_meet_again_is_final_at_once(tmp_path: Path) -> None:
    """torchrun starts them once more, and they find the marker."""
    run = Run.create(tmp_path / "run", train__task="lm", train__data={"path": str(tmp_path / "none")})
    result = torchrun(run, 2, PET_MAX_RESTARTS="9", **LIMIT, **STORE)
    assert result.returncode == 0, result.stderr
    marker = json.loads((run.root / "markers/attempt-000.json").read_text())
    assert marker["state"] == "failed"
    assert marker["cause"].startswith("train.data.path: /")
    assert "rank 0 on here: Traceback" not in result.stderr and "rank 1 on" not in result.stderr
    assert len(run.events("rank_started")) == len(run.events("error")) == 1


@pytest.mark.long
@pytest.mark.ranks(2)
def test_ranks_that_are_killed_at_the_same_step_again_and_again(tmp_path: Path) -> None:
    trouble = {"kind": "SIGKILL", "rank": 1, "call": 4, "where": "loss"}
    run = Run.create(tmp_path / "run", train__task="runtime.troubled:create", train__data={"trouble": trouble})
    result = torchrun(run, 2, PET_MAX_RESTARTS="9", **LIMIT, **STORE)
    assert result.returncode == 0, result.stderr
    marker = json.loads((run.root / "markers/attempt-000.json").read_text())
    assert marker["state"] == "no progress"
    assert len(run.events("rank_started")) == 3
    assert (run.root / "ranks").read_text() == "here\nhere\n"


@pytest.mark.ranks(2)
def test_what_is_not_finite_is_an_error_of_the_rank_that_made_it(tmp_path: Path) -> None:
    """Rank 0 reports it for all."""
    poison = expected_stream(4, 4)[4][4]  # the last sample of step 4, which the last rank gets
    run = Run.create(tmp_path / "run", train__data={"poison": poison})
    result = torchrun(run, 2)
    assert result.returncode != 0
    (error,) = run.events("error")
    assert (error["kind"], error["rank"]) == ("NotFiniteError", 1)
    assert "rank 1 on here: error: step 4: the loss is not finite" in result.stderr and "rank 0 on" not in result.stderr


def test_a_rank_that_says_nothing_leaves_the_one_that_speaks_time(tmp_path: Path) -> None:
    """Rank 0 comes to a user's mistake after the others: torchrun would end it as soon as one of them is gone."""
    script = tmp_path / "fails.py"
    script.write_text(
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from slurmddp.runtime import environment, train\n"
        "from slurmddp.runtime.errors import UserError\n"
        "from slurmddp.runtime.journal import Events\n"
        "env = environment.read()\n"
        "time.sleep(3 * (env.rank == 0))\n"
        "events = Events(Path(sys.argv[1]), attempt=0, node=env.node, rank=env.rank)\n"
        "train.fail(UserError('there is one GPU for 2 ranks'), env, events)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    command += [str(tmp_path / "events.jsonl")]
    ended = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT), "SLURMDDP_ATTEMPT": "0"}, timeout=PATIENCE
    )
    assert ended.returncode != 0
    (event,) = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert (event["event"], event["rank"], event["message"]) == ("error", 0, "there is one GPU for 2 ranks")
