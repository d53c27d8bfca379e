"""Requests to stop, and signals that end the job: what is asked of the ranks, what becomes of the job, who is told."""

from typing import NamedTuple, Optional

from slurmddp.records.cause import Cause
from slurmddp.supervisor.brain import ledger as ledgers
from slurmddp.supervisor.brain.types import (
    CANCELLED,
    CANCELLED_BY_USER,
    NODE_FAILURE,
    PREEMPTION,
    REQUEUED,
    TIME_LIMIT,
    Alert,
    Job,
    Ledger,
    Settings,
)

#: How a job gets back into the queue: nobody brings it; the supervisor does; somebody else has.
STAYS_OUT, ASK, WAS_BROUGHT = "stays out", "ask", "was brought"
#: What an alert says of a job that will not continue.
NEVER_AGAIN = "not restarted automatically"
CONTINUES = "; slurmddp submit --resume continues from its newest checkpoint, if it has one"


class Ending(NamedTuple):
    """What a signal means that ends the job."""

    why: str  # CANCELLED, TIME_LIMIT, PREEMPTION, NODE_FAILURE or REQUEUED
    ledger: Ledger  # to be kept
    withdraw: bool = False  # whether the job is to be cancelled, for Slurm may have put it back by itself
    back: str = STAYS_OUT  # STAYS_OUT, ASK or WAS_BROUGHT
    kept: str = ""  # why it stays out, if that is worth a word


def ending(
    settings: Settings, why: str, ledger: Ledger, stop: Optional[str], saved: Optional[bool], attempt: int
) -> Ending:
    """Decide what becomes of a job that a signal ends. why: as the scheduler says it. stop: of the stop file."""
    if stop == CANCELLED_BY_USER:
        return Ending(CANCELLED, ledger, withdraw=why != CANCELLED)
    if why == REQUEUED:
        return Ending(why, ledger, back=WAS_BROUGHT)
    if why == NODE_FAILURE and ledgers.hours_are_used(settings, ledger.gpu_seconds):
        return Ending(why, ledger, withdraw=True, kept=ledgers.hours_text(settings, ledger.gpu_seconds))
    if why == NODE_FAILURE:
        return Ending(why, ledger, back=ASK)
    if why in (TIME_LIMIT, PREEMPTION):
        on = ledgers.goes_on(settings, ledger, why, saved, attempt)
        return Ending(why, on.ledger, back=ASK if on.yes else STAYS_OUT, kept=on.why_not)
    return Ending(why, ledger)


def why_signalled(job: Job) -> str:
    """Return why Slurm ends the job: scancel, the time limit, a preemption and a requeue send the same signal."""
    if job.restarts > job.restarts_then:
        return REQUEUED
    if job.reason == "TimeLimit":
        return TIME_LIMIT
    if job.preempted:
        return PREEMPTION
    if job.state.startswith("NODE_FAIL") or job.reason == "NodeDown":
        return NODE_FAILURE
    return CANCELLED


def why_unanswered(job: Job, stop: Optional[str]) -> str:
    """Return why the job ends, as far as it is known without Slurm's answer. job: as it was hours ago, maybe. stop: of
    the stop file.

    Without a hint, it is handled like a time limit: scancel itself needs a controller that answers, so a cancel is the
    least likely reason, and a run that continues by mistake costs less than one that stops by mistake.
    """
    reason = why_signalled(job)
    if reason != CANCELLED or job.state == "CANCELLED":
        return reason
    return stop if stop in (TIME_LIMIT, PREEMPTION) else TIME_LIMIT


def why_warned(job: Job) -> str:
    """Return why Slurm sends USR2: before the time limit and, on some sites, before a preemption."""
    return PREEMPTION if job.preempted else TIME_LIMIT


def asked(settings: Settings) -> str:
    """Return what is asked of the ranks by the stop file."""
    if settings.own_script:
        return "the script is asked to save and exit"
    return "ranks save a checkpoint, then exit"


def stop_alert(settings: Settings, reason: str, ledger: Ledger, saved: Optional[bool]) -> Optional[Alert]:
    """Return the alert of a request to stop; None if the job will not be requeued: then the last alert tells more."""
    if reason not in (TIME_LIMIT, PREEMPTION):
        return None
    if settings.must_save and (
        saved is False or (reason == TIME_LIMIT and ledgers.missing_evidence(settings, ledger, saved))
    ):
        return None
    return Alert("stopping", "stopping", Cause(reason), asked(settings))


def stopped_alert(cause: Cause, kept: str) -> Alert:
    """Return the last alert of a job that will not continue."""
    following = NEVER_AGAIN
    if not kept:
        following += CONTINUES
    return Alert("stopping", "stopped", cause, following)
