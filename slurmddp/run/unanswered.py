"""Finds the job of a submission that sbatch did not answer: it may be in the queue all the same."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from slurmddp.cluster.base import JobId, JobView
from slurmddp.cluster.choose import ask_all
from slurmddp.cluster.client import Slurm
from slurmddp.errors import ExternalError, UserError
from slurmddp.run import index, submission
from slurmddp.run.evidence import Evidence
from slurmddp.run.gate import own_or_none
from slurmddp.run.layout import RunFolder
from slurmddp.styled import labelled


def with_job(folder: RunFolder, facts: Evidence) -> Evidence:
    """Return the facts with the job of a submission without an answer, if it is in the queue; and note it.

    Raises ExternalError where Slurm does not answer, UserError where this machine has no squeue.
    """
    if not facts.unanswered or facts.submission is None:
        return facts
    run = own_or_none(folder)
    job_id = Slurm().job_of_run(folder.id) if run else None  # of another user's run, squeue --me says nothing
    if run is None or job_id is None:
        return facts
    sent = facts.submission._replace(job_id=str(job_id), failed="")
    with contextlib.suppress(OSError):  # on a full disk, the next look finds it again
        submission.write(run, sent)
    if (entry := index.entry_of(folder)) is not None:
        index.record(replace(entry, job_id=sent.job_id))
    return replace(facts, submission=sent)


@dataclass(frozen=True)
class Asked:
    """What the schedulers say of many runs. silent: `is_local` of those that did not answer."""

    runs: Sequence[tuple[RunFolder, Evidence]]
    views: dict[JobId, JobView]
    silent: set[bool]

    def answered(self, facts: Evidence) -> bool:
        """Return whether the scheduler of this run has answered."""
        if facts.unanswered:
            return False not in self.silent
        return facts.job_id is None or facts.job_id.is_local not in self.silent


def ask_about(
    found: Sequence[tuple[RunFolder, Evidence]], say: Callable[[str], None], *, newest: bool = False
) -> Asked:
    """Ask each scheduler once about the jobs of these runs, or the newest of each. `say` hears who is silent."""
    runs = list(found)
    lost: set[bool] = set()
    for at, (folder, facts) in enumerate(runs):
        if not facts.unanswered or lost:
            continue
        try:
            runs[at] = (folder, with_job(folder, facts))
        except (ExternalError, UserError) as error:
            say(labelled("warning", f"{error}"))
            lost.add(False)
    views, silent = ask_all((job_id for _, facts in runs for job_id in facts.job_ids[-1 if newest else 0 :]), say)
    return Asked(runs, views, silent | lost)
