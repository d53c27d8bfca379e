"""What comes after an attempt: each kind of end, and what of it is kept."""

from __future__ import annotations

from typing import Any

import pytest

from slurmddp.records.cause import CONSEQUENCE, NOT_FOUND, Cause
from slurmddp.records.job_events import USER
from slurmddp.records.marker import Marker, Signal
from slurmddp.records.progress import Failure
from slurmddp.records.refusal import Refusal
from slurmddp.supervisor.brain.decide import best_cause, decide
from slurmddp.supervisor.brain.ledger import MOST_STRANGERS
from slurmddp.supervisor.brain.types import CANCELLED_BY_USER, KILLED, Decision, Facts, Job, Ledger, Settings

SETTINGS = Settings("/run")
BEFORE = Ledger(failures=(Failure(0, 7),), gpu_seconds=5.0)
BOOM = Cause("ValueError: boom", 1, "n1")
ENDED = Facts(attempt=2, exit_code=1, job=Job("RUNNING"), chosen=("n1", "n2"), noted=BOOM)
FAILED_ONCE_MORE = BEFORE._replace(failures=(Failure(0, 7), Failure(2, 0)))
TERMED = Marker("stopped", "SIGTERM received by rank 3 on n2", signal=Signal("SIGTERM", 3, "n2"))
NOBODY = "SIGTERM that neither Slurm nor the user sent (earlyoom, or an administrator?)"


def end(**facts: Any) -> Decision:
    return decide(SETTINGS, ENDED._replace(**facts), BEFORE)


@pytest.mark.parametrize(
    ("facts", "what", "cause", "ended_by", "kept"),
    [
        ({"ending": "time limit", "back": True}, "requeue", "time limit", "time limit", ""),
        ({"ending": "preemption", "kept": "no save"}, "stopped", "preemption; no save", "preemption", "no save"),
        ({"ending": "cancelled"}, "cancelled", "cancelled", "cancelled", ""),
        ({"ending": KILLED}, "failed", KILLED, KILLED, ""),
        ({"marker": Marker("done")}, "done", "", "", ""),
        ({"exit_code": 0}, "done", "", "", ""),
        ({"stop": CANCELLED_BY_USER}, "stopped", CANCELLED_BY_USER, "cancelled", ""),
        ({"stop": "stop file"}, "stopped", "stop file", "", ""),
        ({"stop": "time limit", "noted": None}, "requeue", "time limit", "time limit", ""),
        ({"marker": Marker("stopped", "a stop file")}, "stopped", "a stop file", "", ""),
        ({"marker": Marker("stopped"), "job": Job(preempted=True)}, "requeue", "preemption", "preemption", ""),
    ],
)
def test_an_end_that_is_no_failure_leaves_the_ledger(
    facts: dict[str, Any], what: str, cause: str, ended_by: str, kept: str
) -> None:
    found = end(**facts)
    assert (found.what, found.cause.text, found.ended_by, found.not_requeued) == (what, cause, ended_by, kept)
    assert found.ledger.failures == BEFORE.failures and found.ledger.gpu_seconds == 5.0
    assert found.marker is None and not found.exclude and not found.suspects


def test_a_failure_is_counted_and_the_next_attempt_follows() -> None:
    assert end() == Decision("next", BOOM, FAILED_ONCE_MORE)
    assert end(exit_code=0, abandoned="no answer").cause.text == "ValueError: boom; no answer"
    assert end(marker=Marker("stopped", "x"), abandoned="no answer").what == "next"
    assert end(killed_agents=("n2",)).suspects == ("n2",)
    assert end(killed_agents=("n2",), abandoned="no answer").suspects == ()


def test_three_starts_without_progress_are_the_last() -> None:
    twice = BEFORE._replace(failures=(Failure(0, 0), Failure(1, 0)))
    last = decide(SETTINGS, ENDED, twice)
    why = "3 starts in a row crashed before step 1"
    assert (last.what, last.cause) == ("failed", BOOM._replace(more=why))
    assert last.marker == Marker("no progress", why, BOOM.text, rank=1, node="n1")
    assert len(last.ledger.failures) == 3
    assert decide(SETTINGS._replace(breaker=4), ENDED, twice).what == "next"


@pytest.mark.parametrize("state", ["failed", "no progress"])
def test_ranks_that_gave_up_end_the_run(state: str) -> None:
    marker = Marker(state, "3 starts in a row", "OSError: full", rank=2, node="n2")
    assert end(marker=marker, noted=None).cause.line().startswith("rank 2 on n2: OSError: full")
    known = end(marker=marker)
    assert (known.what, known.cause.text, known.cause.more) == (
        "failed", BOOM.text, "3 starts in a row" if state == "no progress" else "",
    )  # fmt: skip
    assert end(marker=marker._replace(reason=BOOM.text)).cause.more == ""
    reset = Cause("Connection reset by peer", 0, "n1", CONSEQUENCE)
    assert end(marker=marker, noted=None, logged=reset).cause.text == "OSError: full"


def test_what_the_ranks_say_comes_before_the_logs_unless_it_follows_from_another_failure() -> None:
    reset, killed = Cause("Connection reset", 0, "n1", CONSEQUENCE), Cause("killed by SIGKILL", 1, "n2")
    assert best_cause(ENDED._replace(logged=killed)) == BOOM
    assert best_cause(ENDED._replace(noted=reset, logged=killed)) == killed
    assert best_cause(ENDED._replace(noted=reset)) == reset
    assert best_cause(ENDED._replace(noted=None)) == Cause("unknown", kind=NOT_FOUND)


def test_a_sigterm_of_a_stranger_is_a_failure_with_rank_and_node() -> None:
    alone = end(marker=TERMED, noted=None, signalled=1)
    assert (alone.what, alone.cause, alone.ledger) == ("next", Cause(NOBODY, 3, "n2"), FAILED_ONCE_MORE)
    assert end(marker=TERMED, noted=None, signalled=2).what == "stopped", "all nodes got it: Slurm's"
    assert end(marker=TERMED, noted=None, job=Job("COMPLETING")).what == "stopped"
    local = decide(SETTINGS._replace(scheduler="local"), ENDED._replace(marker=TERMED, job=Job()), BEFORE)
    assert local.what == "next"
    assert end(marker=TERMED, noted=None, stop="stop file").what == "stopped"


def test_a_killed_agent_is_the_cause_also_if_ranks_elsewhere_could_still_save() -> None:
    """srun ends the other agents with SIGTERM, and these their ranks, before the killed agent's own ranks are gone."""
    killed = Cause("the torchrun agent: Killed", node="n1")
    last = end(marker=TERMED, noted=None, logged=killed, signalled=1, killed_agents=("n1",))
    assert (last.what, last.cause, last.suspects) == ("next", killed, ("n1",))


def test_a_stranger_is_told_of_and_counts_only_after_many_times() -> None:
    forged = Cause("somebody else changed the rendezvous", node="n1")
    first = end(stranger=forged)
    assert first.what == "next" and first.ledger == BEFORE._replace(strangers=1)
    assert first.cause.text == forged.text + " (another user, or another job: this start does not count as a failure)"
    often = decide(SETTINGS, ENDED._replace(stranger=forged), BEFORE._replace(strangers=MOST_STRANGERS))
    assert often.ledger == FAILED_ONCE_MORE._replace(strangers=MOST_STRANGERS + 1)


def test_what_the_user_has_to_correct_ends_the_run_if_all_nodes_say_it() -> None:
    wrong, broken = Refusal("no module x", USER), Refusal("no space left")
    everywhere = end(refused={"n1": wrong, "n2": wrong})
    assert (everywhere.what, everywhere.cause) == ("failed", Cause("no module x", node="n2"))
    somewhere = end(refused={"n1": wrong, "n2": broken, "n3": wrong})
    assert (somewhere.what, somewhere.cause) == ("next", Cause("no module x", node="n1"))
    assert somewhere.exclude == (("n1", "no module x"),)
    assert end(refused={"n1": broken, "n2": broken}).cause == BOOM
    looked = decide(SETTINGS._replace(preflight="yes"), ENDED._replace(refused={"n1": wrong, "n2": wrong}), BEFORE)
    assert (looked.what, looked.cause, looked.exclude) == ("next", BOOM, ())


def test_lost_nodes_are_not_the_runs_fault_and_unreached_ones_are_avoided() -> None:
    assert end(lost=("n2",)) == Decision("next", Cause("Slurm lost the node (NodeFail)", node="n2"), BEFORE)
    assert end(lost=("n2", "n1")).cause.text.endswith("(NodeFail), together with n1")
    silent = Decision("next", Cause("no heartbeat for 5 s", node="n2"), BEFORE)
    assert end(silent=("n2",), exit_code=137) == silent
    assert end(silent=("n2",), lost=("n1",)).cause.text == "no heartbeat for 5 s, together with n1"
    found = end(unreached=(("n1", "no route"), ("n2", "refused")))
    assert found.cause == Cause("Slurm could not start the ranks there: no route", node="n1")
    assert found.suspects == ("n1", "n2") and found.ledger == FAILED_ONCE_MORE


def test_a_stop_without_what_a_next_start_needs_is_the_end() -> None:
    own = Settings("/run", own_script=True, must_save=True)
    kept = decide(own, Facts(0, 0, stop="time limit", saved=False), Ledger())
    assert kept.what == "stopped" and kept.not_requeued and kept.cause.text == "time limit; " + kept.not_requeued
    on = decide(own, Facts(0, 0, stop="time limit", saved=True), Ledger())
    assert (on.what, on.cause.text, on.not_requeued) == ("requeue", "time limit", "")
    limited = decide(SETTINGS, ENDED._replace(hopeless="the GPU hours are used"), BEFORE)
    assert (limited.what, limited.cause.more) == ("failed", "the GPU hours are used")
