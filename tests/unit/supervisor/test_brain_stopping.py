"""Signals, requests to stop and the ledger: whether a run goes back into the queue."""

from random import Random
from typing import Any

import pytest

from slurmddp.records.cause import CONSEQUENCE, Cause
from slurmddp.records.progress import Failure, Progress
from slurmddp.records.rank_events import Restarted
from slurmddp.supervisor.brain import ledger as ledgers
from slurmddp.supervisor.brain import stopping
from slurmddp.supervisor.brain.decide import decide
from slurmddp.supervisor.brain.types import Facts, Job, Ledger, Marker, Settings

BUNDLED = Settings("/run")
OWN = Settings("/run", own_script=True, must_save=True, breaker_from_zero=2)
STEP = Progress(41)


def after_limit(settings: Settings, ledger: Ledger, saved: bool | None) -> ledgers.GoesOn:
    return ledgers.goes_on(settings, ledger, "time limit", saved, 3)


# --- evidence


def restarted(how: str, step: int | None, before: int | None = 147) -> Restarted:
    return Restarted(how, step, before, before, None, "")


@pytest.mark.parametrize(
    ("events", "saved", "goes_on"),
    [
        ([], True, True),
        ([], False, False),
        ([], None, False),
        ([("went on", 148)], True, True),
        ([("went on", None)], True, True),
        ([("went on", 148)], False, False),
        ([("from zero", 1)], True, False),
        ([("unknown", None)], True, False),
        ([("from zero", 1), ("went on", 148)], True, True),
        ([("went on", 148), ("from zero", 1)], True, False),
        ([("went on", 148), ("unknown", None)], True, False),
    ],
)
def test_an_own_script_is_requeued_with_evidence_only(events: Any, saved: bool | None, goes_on: bool) -> None:
    """It saved in this job and, once it was started again, it went on. What is not known is no evidence."""
    ledger = Ledger(progress=Progress(200))
    for how, step in events:
        ledger = ledgers.note_restart(ledger, restarted(how, step))
    found = after_limit(OWN, ledger, saved)
    assert found.yes == goes_on and bool(found.why_not) == (not goes_on)
    assert found.yes or "recovery.requeue: always" in found.why_not
    assert after_limit(OWN._replace(must_save=False), ledger, saved).yes
    assert ledgers.goes_on(OWN, ledger, "preemption", saved, 3).yes


@pytest.mark.parametrize(
    ("rehearsed", "ledger", "saved", "goes_on"),
    [
        (True, Ledger(), None, True),
        (True, Ledger(started_again=True), True, True),
        (True, Ledger(), False, False),  # nothing is there from which to resume
        (True, Ledger(started_again=True, went_on=False), True, False),  # what it did counts more
        (False, Ledger(), True, False),
        (False, Ledger(started_again=True, went_on=True), True, True),
        (None, Ledger(), True, True),
    ],
)
def test_a_rehearsal_is_evidence(rehearsed: bool | None, ledger: Ledger, saved: bool | None, goes_on: bool) -> None:
    found = after_limit(OWN._replace(rehearsed=rehearsed), ledger, saved)
    assert found.yes == goes_on
    assert ("check --rehearse" in found.why_not) == (rehearsed is False and not goes_on)


def test_what_keeps_a_script_from_the_queue_is_said() -> None:
    why = after_limit(OWN, Ledger(progress=STEP), False).why_not
    assert why == (
        "the script saved nothing in /run/checkpoints since this job began (the last step seen is 41): a requeued job "
        "may begin again. Save there and load from there (docs/frameworks.md); if it does so elsewhere, name that "
        "place in checkpoint.watch, or set recovery.requeue: always"
    )
    where = OWN._replace(checkpoints=("/run/checkpoints", "/data/out"))
    assert "saved something in /run/checkpoints or /data/out since" in after_limit(where, Ledger(), None).why_not


def test_a_restart_before_which_no_step_was_made_proves_nothing() -> None:
    assert ledgers.note_restart(Ledger(), restarted("went on", 1, before=None)) == Ledger()


def test_an_own_script_that_was_seen_to_go_on_is_measured_by_its_steps() -> None:
    """Three starts in a row that come no further than the best one are the last."""
    ledger = ledgers.note_restart(Ledger(), restarted("went on", 101))
    assert ledger.best == 147 and ledger.step_of_run
    for step, goes_on in ((300, True), (300, True), (290, True), (310, True), (310, True), (310, True), (310, False)):
        found = after_limit(OWN, ledger._replace(progress=Progress(step)), True)
        assert found.yes == goes_on, (step, found)
        ledger = found.ledger
    assert "3 starts in a row came no further than step 310 (no_progress)" in found.why_not


# --- the ledger


@pytest.mark.parametrize(
    ("best", "failures", "goes_on", "best_then"),
    [
        (40, [], True, 41),
        (None, [], True, 41),
        (41, [], True, 41),
        (41, [41, 41], False, 41),
        (40, [41, 41], False, 40),
        (None, [41, 41], False, None),
        (40, [40, 40], True, 41),
        (41, [50, 50], False, 41),
    ],
)
def test_a_start_that_gains_nothing_counts_whatever_ended_it(
    best: int | None, failures: Any, goes_on: bool, best_then: int | None
) -> None:
    """Starts that failed and starts that reached their limit are in one list."""
    ledger = Ledger(tuple(Failure(0, step) for step in failures), Progress(41, 100), best)
    found = after_limit(BUNDLED, ledger, None)
    assert (found.yes, found.ledger.best) == (goes_on, best_then)
    assert ledgers.goes_on(BUNDLED._replace(requeue_policy="none"), ledger, "time limit", None, 3)[::2] == (False, "")


def test_the_gpu_hours_of_all_starts_are_the_last_word() -> None:
    settings = OWN._replace(must_save=False, max_gpu_hours=10)
    assert ledgers.goes_on(settings, Ledger(gpu_seconds=35999), "preemption", None, 3).yes
    found = ledgers.goes_on(settings, Ledger(gpu_seconds=36000), "preemption", None, 3)
    assert (found.yes, found.why_not) == (False, "the run has used 10.0 GPU hours, and recovery.max_gpu_hours is 10")


def test_the_files_of_a_ledger_are_read_as_they_are_written() -> None:
    random = Random(3)
    for _ in range(60):
        pick = random.choice
        ledger = Ledger(
            tuple(Failure(random.randint(0, 9), random.randint(0, 99)) for _ in range(random.randint(0, 4))),
            pick((None, Progress(3), Progress(3, 9))),
            pick((None, 0, 7)),
            random.random() * 1e6,
            random.randint(0, 3),
            pick(("", 'ValueError: "x"\ny')),
            random.randint(0, 11),
            pick((True, False)),
            pick((None, True, False)),
            pick((True, False)),
        )
        failures = "".join(line + "\n" for line in ledgers.lines_to_add(Ledger(), ledger))
        progress = " ".join(str(number) for number in ledger.progress or () if number is not None)
        best = "" if ledger.best is None else f"{ledger.best}\n"
        assert ledgers.with_files(ledgers.read(ledgers.own_part(ledger)), failures, progress, best) == ledger


@pytest.mark.parametrize("text", ["", "x", "1\n", "1 2 3\nx 4\n-1 2\n1 99999999999999999\n", "\x00\x00"])
def test_damaged_files_are_left_out(text: str) -> None:
    found = ledgers.with_files(Ledger(), text, "x 4", "nothing")
    assert (found.failures, found.progress, found.best) == ((), None, None)
    assert (
        ledgers.read({"gpu_seconds": "x", "from_zero": 1.5, "last_error": 3, "went_on": 1, "strangers": True})
        == Ledger()
    )


# --- signals


@pytest.mark.parametrize(
    ("job", "why"),
    [
        (Job("COMPLETING", "TimeLimit", preempted=True, restarts=1, restarts_then=0), "requeued"),
        (Job("COMPLETING", "TimeLimit", preempted=True, restarts=1, restarts_then=1), "time limit"),
        (Job("COMPLETING", "None", preempted=True), "preemption"),
        (Job("NODE_FAIL", "None"), "node failure"),
        (Job("COMPLETING", "NodeDown"), "node failure"),
        (Job("CANCELLED", "None"), "cancelled"),
        (Job(), "cancelled"),
    ],
)
def test_only_slurm_knows_which_signal_it_was(job: Job, why: str) -> None:
    assert stopping.why_signalled(job) == why
    assert stopping.why_warned(job) == ("preemption" if job.preempted else "time limit")


@pytest.mark.parametrize(
    ("job", "stop", "why"),
    [
        (Job("RUNNING", "None"), None, "time limit"),
        (Job(), "SIGINT", "time limit"),
        (Job("RUNNING", "None"), "preemption", "preemption"),
        (Job("RUNNING", "None"), "time limit", "time limit"),
        (Job("RUNNING", "None", preempted=True), None, "preemption"),
        (Job("RUNNING", "None", restarts=1), "time limit", "requeued"),
        (Job("CANCELLED", "None"), None, "cancelled"),
    ],
)
def test_a_silent_controller_cancels_nothing(job: Job, stop: str | None, why: str) -> None:
    assert stopping.why_unanswered(job, stop) == why


@pytest.mark.parametrize("why", ["cancelled", "requeued", "node failure", "time limit", "preemption"])
def test_a_recorded_cancel_wins_over_everything(why: str) -> None:
    ending = stopping.ending(BUNDLED, why, Ledger(), "cancelled by the user", True, 0)
    assert (ending.why, ending.back, ending.withdraw) == ("cancelled", stopping.STAYS_OUT, why != "cancelled")


@pytest.mark.parametrize(
    ("why", "saved", "back"),
    [
        ("cancelled", True, stopping.STAYS_OUT),
        ("requeued", False, stopping.WAS_BROUGHT),
        ("node failure", False, stopping.ASK),
        ("preemption", False, stopping.ASK),
        ("time limit", True, stopping.ASK),
        ("time limit", False, stopping.STAYS_OUT),
        ("time limit", None, stopping.STAYS_OUT),
    ],
)
def test_what_becomes_of_a_job_that_a_signal_ends(why: str, saved: bool | None, back: str) -> None:
    ending = stopping.ending(OWN, why, Ledger(), None, saved, 0)
    assert (ending.why, ending.back, ending.withdraw) == (why, back, False)
    assert bool(ending.kept) == (why == "time limit" and saved is not True)


def test_slurm_does_not_bring_a_run_back_whose_gpu_hours_are_used() -> None:
    settings = OWN._replace(max_gpu_hours=1)
    ending = stopping.ending(settings, "node failure", Ledger(gpu_seconds=3600), None, True, 0)
    assert (ending.back, ending.withdraw) == (stopping.STAYS_OUT, True)
    assert ending.kept == "the run has used 1.0 GPU hours, and recovery.max_gpu_hours is 1"
    assert stopping.ending(settings, "node failure", Ledger(gpu_seconds=3599), None, True, 0).back == stopping.ASK


def test_a_stop_is_told_unless_the_end_tells_more() -> None:
    told = stopping.stop_alert(OWN, "time limit", Ledger(), True)
    assert told and (told.kind, told.state, told.cause.text) == ("stopping", "stopping", "time limit")
    assert told.next == "the script is asked to save and exit"
    assert stopping.stop_alert(OWN, "time limit", Ledger(), False) is None
    assert stopping.stop_alert(OWN, "time limit", Ledger(), None) is None
    assert stopping.stop_alert(BUNDLED, "time limit", Ledger(), False)
    assert stopping.stop_alert(BUNDLED, "the run has used 2.0 GPU hours", Ledger(), True) is None
    kept, free = stopping.stopped_alert(Cause("x"), "nothing saved"), stopping.stopped_alert(Cause("x"), "")
    assert kept.next == "not restarted automatically"
    assert free.next.startswith(kept.next + "; slurmddp submit --resume continues")


# --- decisions that job.sh did not make


FAILED = Facts(attempt=2, exit_code=1, chosen=("n1", "n2"), noted=Cause("ValueError: boom", 1, "n1"))


@pytest.mark.parametrize("abandoned", ["", "all ranks failed this way before the first step of two starts"])
def test_an_attempt_after_which_no_start_is_of_use_is_the_last(abandoned: str) -> None:
    why = "all ranks failed this way before the first step of two starts"
    decision = decide(BUNDLED, FAILED._replace(hopeless=why, abandoned=abandoned), Ledger())
    assert decision.what == "failed" and decision.cause.line() == "rank 1 on n1: ValueError: boom; " + why
    assert decision.marker == Marker("no progress", why, decision.cause.text, rank=1, node="n1")
    lost = decide(BUNDLED, FAILED._replace(hopeless=why, lost=("n2",)), Ledger())
    assert lost.what == "next", "the run is not at fault"


@pytest.mark.parametrize(
    ("events", "code", "cause", "ended_by"),
    [
        (
            Cause("killed by SIGKILL", 0, "n1"),
            137,
            "rank 0 on n1: killed by SIGKILL, when the script had been asked to",
            "",
        ),
        (Cause("killed by SIGKILL", 0, "n1"), 0, "time limit; the script saved nothing", "time limit"),
        (Cause("Connection reset", 0, "n1", CONSEQUENCE), 1, "time limit; the script saved nothing", "time limit"),
        (None, 1, "time limit; the script saved nothing", "time limit"),
    ],
)
def test_a_rank_that_dies_while_it_is_asked_to_save_is_the_cause(
    events: Cause | None, code: int, cause: str, ended_by: str
) -> None:
    facts = Facts(attempt=0, exit_code=code, stop="time limit", noted=events, saved=False)
    decision = decide(OWN, facts, Ledger())
    assert decision.what == "stopped" and decision.cause.line().startswith(cause) and decision.ended_by == ended_by
    assert decision.not_requeued.startswith("the script saved nothing")


@pytest.mark.parametrize(
    ("ledger", "counts"),
    [
        (Ledger(progress=Progress(0, 2000)), True),  # a bundled task
        (Ledger(step_of_run=True), True),
        (Ledger(started_again=True, went_on=False), True),  # began at step 1 again
        (Ledger(started_again=True), False),  # its steps may count from where it went on
    ],
)
def test_a_start_that_gains_nothing_over_the_best_one_counts_whatever_ended_that(ledger: Ledger, counts: bool) -> None:
    """The best one ended at its time limit, at step 1000. Later ones crash, each a little further than the last."""
    ledger = ledger._replace(best=1000, failures=(Failure(0, 7),))
    found = []
    for step in (990, 995, 1000):
        progress = Progress(step, ledger.progress.steps if ledger.progress else None)
        decision = decide(BUNDLED, FAILED, ledger._replace(progress=progress))
        ledger = decision.ledger
        found.append(decision.what)
    assert found == ["next", "next", "failed" if counts else "next"]
    assert (decision.cause.more == "3 starts in a row crashed before step 1001") is counts
    further = decide(BUNDLED, FAILED, Ledger(progress=Progress(1001, 2000), best=1000)).ledger
    assert further.failures == (Failure(2, 1001),)


def test_what_others_end_does_not_count_ten_times_per_run() -> None:
    forged = Cause("somebody else changed the state of rendezvous 7", node="n1")
    ledger = Ledger()
    for number in range(13):
        decision = decide(BUNDLED, FAILED._replace(stranger=forged), ledger)
        ledger = decision.ledger
        assert (decision.what, len(ledger.failures)) == ("failed" if number == 12 else "next", max(0, number - 9))
    assert decision.cause.more == "3 starts in a row crashed before step 1"
