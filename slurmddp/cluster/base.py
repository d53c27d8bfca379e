"""What every scheduler gives back, and the small interface that Slurm and the local site share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from slurmddp.cluster.states import JobState
from slurmddp.errors import UserError

_JOB_ID = re.compile(r"(?P<id>[0-9]{1,18}|local-[0-9]{1,18}-[0-9]{1,18})(?:;(?P<cluster>[^\s;]+))?")

# What an outer job, or its srun, leaves in the environment. Submitting with it leaks that job's resources
# into the new one (facebookincubator/submitit#1814; goodfire-ai/spd#955). SQUEUE_*, SACCT_*, SCANCEL_* and
# SCONTROL_* are users' own filters and formats (squeue(1), sacct(1), "ENVIRONMENT VARIABLES"): they would
# hide or reshape what we ask.
LEAKING = (
    "SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_", "PMIX_", "PMI_",
    "SQUEUE_", "SACCT_", "SCANCEL_", "SCONTROL_",
)  # fmt: skip
# How to reach this cluster at all: where slurm.conf is (or who serves it), and the token of sites with
# auth/jwt.
KEPT = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"})


@dataclass(frozen=True)
class JobId:
    """A job's id: Slurm's number (with the cluster where sbatch named one), or `local-PID-STARTTIME`."""

    id: str
    cluster: str | None = None

    def __str__(self) -> str:
        return f"{self.id};{self.cluster}" if self.cluster else self.id

    @property
    def is_local(self) -> bool:
        """Return whether it is a process of the local site and not a Slurm job."""
        return self.id.startswith("local-")

    @classmethod
    def parse(cls, text: str) -> JobId:
        """Read `123`, `123;cluster` or `local-PID-STARTTIME`. Raises UserError for anything else."""
        match = _JOB_ID.fullmatch(text.strip())
        if not match:
            raise UserError(f"{text!r} is not a job id", todo="job ids look like 123, 123;cluster or local-123-456")
        return cls(match["id"], match["cluster"])


@dataclass(frozen=True)
class JobView:
    """What a scheduler says about one job now.

    word:       Slurm's word for its state, for people (PENDING, RUNNING, COMPLETING, CANCELLED, ...), see squeue(1).
    reason:     why it is in that state (Priority, BeginTime, NonZeroExitCode, ...); "" if Slurm gives none.
    restarts:   how often it was requeued; None if the source does not say.
    exit_code, signal: of the batch script; None while it runs, or if the source does not say.
    nodes:      Slurm's node list (`node[1-3]`); "" before it has nodes.
    start, end: the cluster's local time as Slurm prints it (YYYY-MM-DDTHH:MM:SS); expected times while it waits.
    time_limit: seconds; None if unknown or unlimited.
    source:     the command that knew it: scontrol, squeue, sacct, or process (the local site).
    """

    word: str
    reason: str = ""
    restarts: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    nodes: str = ""
    start: str | None = None
    end: str | None = None
    time_limit: int | None = None
    source: str = ""

    @property
    def state(self) -> JobState:
        """Return how it is."""
        return JobState.of(self.word)


class Scheduler(Protocol):
    """What starts a run, says how it is, and ends it: Slurm, or the machine itself."""

    def command(self, options: Sequence[str], script: str, args: Sequence[str], *, log: str) -> tuple[str, ...]:
        """Return the command line that `submit` takes; pure. `log` is the path that gets the script's output."""
        ...

    def submit(self, command: Sequence[str], cwd: Path, *, log: Path) -> JobId:
        """Start the job. Raises UserError or ExternalError with the whole message of whatever refused it."""
        ...

    def job(self, job_id: JobId) -> JobView | None:
        """Return what is known of it now; None if it is forgotten.

        Raises ExternalError if the scheduler does not answer.
        """
        ...

    def jobs(self, job_ids: Iterable[JobId]) -> dict[JobId, JobView]:
        """Return the states of many jobs with few commands, without forgotten jobs. Raises ExternalError."""
        ...

    def cancel(self, job_id: JobId) -> bool:
        """End it; False if there was nothing left to end. Raises ExternalError."""
        ...

    def requeue(self, job_id: JobId) -> None:
        """Put it back into the queue. Raises UserError if that is impossible, ExternalError."""
        ...

    def start_now(self, job_id: JobId) -> None:
        """End the hold of a job that waits for its begin time. Raises UserError, ExternalError."""
        ...


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without what an outer job left in it; how to reach the cluster stays (SLURM_CONF)."""
    return {name: value for name, value in environment.items() if name in KEPT or not name.startswith(LEAKING)}


def log_option(log: str) -> str:
    """Return `--output=LOG` such that sbatch writes to exactly this path.

    sbatch expands %x, %j, ... in it; `%%` is a percent sign, and a backslash anywhere switches that off and
    is removed (sbatch(1), "filename pattern"), so no path with a backslash can be given. Raises UserError for
    such a path.
    """
    if "\\" in log or "\n" in log:
        raise UserError(
            f"the log path {log!r} contains a backslash or newline, which sbatch does not accept",
            todo="choose another runs folder: --set paths.runs=FOLDER",
        )
    return "--output=" + log.replace("%", "%%")
