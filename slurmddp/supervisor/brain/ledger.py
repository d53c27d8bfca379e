"""How far the run has come over all of its starts and jobs, and whether another one is of use.

Three parts of the ledger are files that the ranks write, too: see slurmddp/records/progress.py.
"""

from typing import Any, Dict, List, Mapping, NamedTuple, Optional

from slurmddp.records.progress import Failure, read_best, read_failures, read_progress, stuck
from slurmddp.records.rank_events import Restarted
from slurmddp.records.values import number, whole
from slurmddp.supervisor.brain.types import TIME_LIMIT, Ledger, Settings

#: Attempts of a run that somebody else may end: who can do it again and again must not keep the job in a loop.
MOST_STRANGERS = 10
#: What the file of the brain holds; the ranks write the other parts.
_OWN = ("gpu_seconds", "from_zero", "last_error", "strangers", "started_again", "went_on", "step_of_run")


class GoesOn(NamedTuple):
    """Whether the run may go back into the queue; if not, `why_not` says it, where it is worth a word."""

    yes: bool
    ledger: Ledger
    why_not: str = ""


def goes_on(settings: Settings, ledger: Ledger, reason: str, saved: Optional[bool], attempt: int) -> GoesOn:
    """Decide whether the run goes back into the queue after its time limit or a preemption.

    A start that came no further than an earlier one counts as a failure, where its steps are known to count from the
    beginning of the run: those of a bundled task, and of an own script that was seen to go on. An own script needs
    evidence that its next start continues: what is not known is no evidence.
    """
    if settings.requeue_policy == "none":
        return GoesOn(False, ledger)
    if hours_are_used(settings, ledger.gpu_seconds):
        return GoesOn(False, ledger, hours_text(settings, ledger.gpu_seconds))
    if reason == TIME_LIMIT:
        missing = missing_evidence(settings, ledger, saved)
        if missing:
            return GoesOn(False, ledger, missing)
    progress = ledger.progress
    if progress is None or not _counts_from_step_1(ledger):
        return GoesOn(True, ledger)
    step, best = progress.step, best_step(ledger)
    if best is None or step > best:
        return GoesOn(True, ledger._replace(best=step))
    ledger = ledger._replace(failures=(*ledger.failures, Failure(attempt, best)))
    if stuck(ledger.failures, settings.breaker) is None:
        return GoesOn(True, ledger)
    text = "{} starts in a row came no further than step {} (no_progress): save more often, or ask for more time"
    return GoesOn(False, ledger, text.format(settings.breaker, best))


def missing_evidence(settings: Settings, ledger: Ledger, saved: Optional[bool]) -> str:
    """Return why a requeued job of an own script might begin at step 1 again; empty if it would not, or may."""
    if not settings.must_save:
        return ""
    where = " or ".join(settings.checkpoints or (settings.run + "/checkpoints",))
    again = ": a requeued job may begin again. Save there and load from there (docs/frameworks.md)"
    elsewhere = "; if it does so elsewhere, name that place in checkpoint.watch, or set recovery.requeue: always"
    always = "; recovery.requeue: always requeues in any case"
    if saved is False:
        seen = "" if ledger.progress is None else " (the last step seen is {})".format(ledger.progress.step)
        return "the script saved nothing in {} since this job began{}".format(where, seen) + again + elsewhere
    if settings.rehearsed is False and not ledger.went_on:
        return "this code did not resume when it was killed (slurmddp check --rehearse)" + always
    if saved is None and not settings.rehearsed:
        return "it is not known whether the script saved something in {} since this job began{}".format(where, always)
    if ledger.started_again and not ledger.went_on and not (settings.rehearsed and ledger.went_on is None):
        unseen = "cannot be seen to have gone on behind its last step"
        how = "began at step 1 again" if ledger.went_on is False else unseen
        return "when it was started again, the script {}: a requeued job might do the same{}".format(how, always)
    return ""


def _counts_from_step_1(ledger: Ledger) -> bool:
    """Return whether the steps of the newest start are known to count from the beginning of the run."""
    return ledger.step_of_run or (ledger.progress is not None and ledger.progress.steps is not None)


def best_step(ledger: Ledger) -> Optional[int]:
    """Return the step of the best start that has ended; None if none has."""
    steps = [failure.step for failure in ledger.failures]
    return max(steps if ledger.best is None else [*steps, ledger.best], default=None)


def hours_are_used(settings: Settings, gpu_seconds: float) -> bool:
    """Return whether all starts of the run together have used the GPU hours that it may use."""
    return settings.max_gpu_hours is not None and gpu_seconds >= settings.max_gpu_hours * 3600


def hours_text(settings: Settings, gpu_seconds: float) -> str:
    """Return the reason for a stop at this limit."""
    text = "the run has used {:.1f} GPU hours, and recovery.max_gpu_hours is {:g}"
    return text.format(gpu_seconds / 3600, settings.max_gpu_hours or 0)


def count_failure(settings: Settings, ledger: Ledger, attempt: int, uncounted: int) -> Ledger:
    """Add the failed starts of an attempt. uncounted: those of them that the ranks could not count themselves.

    Never so many that this alone is the last attempt: before the next one, nodes are checked, and a container that has
    lost its image fails all starts in place.
    """
    count = max(1, uncounted if uncounted < settings.breaker else settings.breaker - 1)
    step, best = 0 if ledger.progress is None else ledger.progress.step, best_step(ledger)
    if best is not None and (_counts_from_step_1(ledger) or ledger.went_on is False):
        step = max(step, best)  # what gained nothing over the best start counts, whatever ended that one
    return ledger._replace(failures=ledger.failures + (Failure(attempt, step),) * count)


def note_restart(ledger: Ledger, event: Restarted) -> Ledger:
    """Keep what a start of an own script went on from."""
    if event.before is None:
        return ledger  # no earlier start made a step: there was nothing to lose
    if event.how == "went on":
        steps = [step for step in (ledger.best, event.best) if step is not None]
        known = event.step is not None
        ledger = ledger._replace(best=max(steps, default=None)) if known else ledger
        return ledger._replace(started_again=True, went_on=True, from_zero=0, step_of_run=known)
    if event.how == "from zero":
        from_zero = ledger.from_zero + 1
        return ledger._replace(started_again=True, went_on=False, from_zero=from_zero, step_of_run=False)
    return ledger._replace(started_again=True, went_on=None, step_of_run=False)


# --- files


def read(own: Mapping[str, Any]) -> Ledger:
    """Return what the object of the brain's own file says. What is not sound is left out."""
    went_on, error = own.get("went_on"), own.get("last_error")
    from_zero, strangers = (whole(own.get(name)) or 0 for name in ("from_zero", "strangers"))
    started_again, step_of_run = (own.get(name) is True for name in ("started_again", "step_of_run"))
    return Ledger(
        gpu_seconds=number(own.get("gpu_seconds")) or 0.0, from_zero=from_zero, strangers=strangers,
        last_error=error if isinstance(error, str) else "", started_again=started_again,
        went_on=went_on if isinstance(went_on, bool) else None, step_of_run=step_of_run,
    )  # fmt: skip


def with_files(ledger: Ledger, failures: str, progress: str, best: str) -> Ledger:
    """Return the ledger with what the texts of the files say that ranks write, too."""
    steps = [step for step in (read_best(best), ledger.best) if step is not None]
    return ledger._replace(
        failures=read_failures(failures), progress=read_progress(progress), best=max(steps, default=None)
    )


def own_part(ledger: Ledger) -> Dict[str, Any]:
    """Return the object of the brain's own file."""
    return {name: getattr(ledger, name) for name in _OWN}


def lines_to_add(before: Ledger, after: Ledger) -> List[str]:
    """Return what is to be appended to the file `failures`."""
    return [failure.line() for failure in after.failures[len(before.failures) :]]
