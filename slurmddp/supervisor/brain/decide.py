"""What comes after an attempt."""

from typing import Tuple, Union

from slurmddp.records.cause import CONSEQUENCE, NOT_FOUND, Cause
from slurmddp.records.job_events import USER
from slurmddp.records.progress import stuck
from slurmddp.supervisor.brain import ledger as ledgers
from slurmddp.supervisor.brain.heartbeats import NO_HEARTBEAT
from slurmddp.supervisor.brain.types import (
    CANCELLED,
    CANCELLED_BY_USER,
    DONE,
    FAILED,
    KILLED,
    NEXT,
    PREEMPTION,
    REQUEUE,
    STOPPED,
    TIME_LIMIT,
    Decision,
    Facts,
    Ledger,
    Marker,
    Settings,
)


def decide(settings: Settings, facts: Facts, ledger: Ledger) -> Decision:
    """Decide what comes after an attempt, from what is known at its end.

    What ends the job from outside comes first, then what the ranks' marker says, then a request to stop, and only then
    the exit code: torchrun makes every code 1.
    """
    state = facts.marker.state if facts.marker else ""
    if facts.ending:
        what = REQUEUE if facts.back else {CANCELLED: CANCELLED, KILLED: FAILED}.get(facts.ending, STOPPED)
        return Decision(what, _with(facts.ending, facts.kept), ledger, ended_by=facts.ending, not_requeued=facts.kept)
    if state == DONE:
        return Decision(DONE, Cause(""), ledger)
    if facts.stop == CANCELLED_BY_USER:
        return Decision(STOPPED, Cause(CANCELLED_BY_USER), ledger, ended_by=CANCELLED)
    if facts.marker and state in (FAILED, "no progress"):
        return Decision(FAILED, _cause_with_marker(facts, facts.marker), ledger)
    if facts.stop is not None or (state == STOPPED and not facts.abandoned):
        return _after_stop(settings, facts, ledger)
    if facts.exit_code == 0 and not facts.abandoned:
        return Decision(DONE, Cause(""), ledger)  # an own script reports it by its exit code
    return _after_failure(settings, facts, ledger)


def best_cause(facts: Facts) -> Cause:
    """Return what the ranks reported, unless it only follows from another failure, and the logs know a better one."""
    if facts.noted is not None and facts.noted.kind != CONSEQUENCE:
        return facts.noted
    return facts.logged or facts.noted or Cause("unknown", kind=NOT_FOUND)


def _cause_with_marker(facts: Facts, marker: Marker) -> Cause:
    cause = best_cause(facts)
    nothing = facts.noted is None and facts.logged is None
    if nothing or (facts.noted is None and cause.kind == CONSEQUENCE):
        cause = Cause(marker.cause, marker.rank, marker.node)  # which knows more than a log with consequences alone
    last = marker.state == "no progress" and marker.reason != cause.text
    return cause._replace(more=marker.reason) if last else cause


def _after_stop(settings: Settings, facts: Facts, ledger: Ledger) -> Decision:
    """A run continues if the cluster was the reason for its stop."""
    what, ended_by, kept = STOPPED, "", facts.kept
    reason = facts.stop or (PREEMPTION if facts.job.preempted else "")  # without a stop file, ranks got a signal
    if reason in (TIME_LIMIT, PREEMPTION):
        ended_by = reason
        on = ledgers.goes_on(settings, ledger, reason, facts.saved, facts.attempt)
        what, ledger, kept = REQUEUE if on.yes else STOPPED, on.ledger, on.why_not or kept
    reason = reason or (facts.marker.reason if facts.marker else "")
    cause = _with(reason, kept)
    noted = facts.noted
    own = noted is not None and noted.kind != CONSEQUENCE and not (facts.marker and facts.marker.state)
    if ended_by and noted is not None and own and facts.exit_code != 0:
        text = "{}, when the script had been asked to save and exit ({})".format(noted.text, reason)
        cause, ended_by = _with(noted._replace(text=text), kept), ""
    decision = Decision(what, cause, ledger, ended_by=ended_by, not_requeued=kept)
    marker = facts.marker
    if facts.stop is None and not ended_by and marker and marker.terminated and _nobody_asked(settings, facts):
        if facts.killed_agents:
            return _after_failure(settings, facts, ledger)  # srun ended the other agents, which told their ranks
        _, rank, node = marker.signal or ("", None, "")
        text = "SIGTERM that neither Slurm nor the user sent (earlyoom, or an administrator?)"
        decision = decision._replace(what=NEXT, cause=facts.stranger or Cause(text, rank, node))
        return _break(settings, facts, decision)
    return decision


def _nobody_asked(settings: Settings, facts: Facts) -> bool:
    """Return whether only some ranks got a SIGTERM. Slurm sends it to all of a job or step, agents included."""
    running = settings.scheduler == "local" or facts.job.state == "RUNNING"
    return running and facts.signalled < len(facts.chosen)


def _after_failure(settings: Settings, facts: Facts, ledger: Ledger) -> Decision:
    cause = best_cause(facts)
    exclude: Tuple[Tuple[str, str], ...] = ()
    refusals = ((node, facts.refused.get(node)) for node in facts.chosen)
    refused = [(node, refusal.text) for node, refusal in refusals if refusal is not None and refusal.fault == USER]
    if not settings.preflight and refused:
        # Without a preflight, node.sh says it at the start. On some nodes only, these are not used again.
        node, text = refused[-1]
        cause = Cause(text, node=node)
        if len(refused) == len(facts.chosen):
            return Decision(FAILED, cause, ledger)
        exclude = tuple((bad, text) for bad, _ in refused)
    if facts.abandoned:
        cause = _with(cause, facts.abandoned)
    decision = Decision(NEXT, cause, ledger, exclude=exclude)
    first, *others = (*facts.silent, *facts.lost, "")
    if first:
        text = NO_HEARTBEAT if facts.silent else "Slurm lost the node (NodeFail)"
        more = ", together with " + " ".join(others[:-1]) if others[:-1] else ""  # a cause names one node
        return decision._replace(cause=Cause(text + more, node=first))  # the run is not at fault
    if facts.unreached:
        node, text = facts.unreached[0]
        cause = Cause("Slurm could not start the ranks there: " + text, node=node)
        decision = decision._replace(cause=cause, suspects=tuple(bad for bad, _ in facts.unreached))
    elif not facts.abandoned:
        decision = decision._replace(suspects=facts.killed_agents)
    return _break(settings, facts, decision)


def _break(settings: Settings, facts: Facts, decision: Decision) -> Decision:
    """Decide whether an attempt that failed was the last one. One that a stranger has ended is not the run's fault."""
    ledger = decision.ledger
    if facts.stranger is not None:
        ledger = ledger._replace(strangers=ledger.strangers + 1)
        if ledger.strangers <= ledgers.MOST_STRANGERS:
            more = " (another user, or another job: this start does not count as a failure)"
            cause = facts.stranger._replace(text=facts.stranger.text + more)
            return decision._replace(cause=cause, ledger=ledger)
    ledger = ledgers.count_failure(settings, ledger, facts.attempt, facts.uncounted)
    reason, step = facts.hopeless, stuck(ledger.failures, settings.breaker)
    if not reason and step is not None:
        reason = "{} starts in a row crashed before step {}".format(settings.breaker, step + 1)
    if not reason:
        return decision._replace(ledger=ledger)
    cause = decision.cause if facts.hopeless and facts.abandoned else decision.cause._replace(more=reason)
    marker = Marker("no progress", reason, cause.text, rank=cause.rank, node=cause.node)
    return decision._replace(what=FAILED, cause=cause, ledger=ledger, marker=marker)


def _with(cause: Union[Cause, str], more: str) -> Cause:
    """Return a cause with something behind its text."""
    known = Cause(cause) if isinstance(cause, str) else cause
    return known._replace(text="{}; {}".format(known.text, more)) if more else known
