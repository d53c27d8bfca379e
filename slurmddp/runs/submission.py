"""submission.json: what the scheduler answered when the run was submitted."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from slurmddp.errors import UserError
from slurmddp.runs.gate import OwnRun
from slurmddp.runs.layout import RunFolder
from slurmddp.shared.files import read_json

SCHEDULERS = ("slurm", "local", "allocation")


@dataclass(frozen=True)
class Submission:
    """How a run was handed over.

    job_id     `123`, `123;cluster` or `local-PID-STARTTIME`; of the surrounding job for an allocation
    scheduler  slurm (sbatch), local (a process of this machine), allocation (`slurmddp run` inside a job)
    command    the command line that was run
    time       when, ISO 8601 with zone
    host       on which machine (a local process is found only there)
    """

    job_id: str
    scheduler: str
    command: tuple[str, ...]
    time: str
    host: str

    @classmethod
    def now(cls, job_id: str, scheduler: str, command: Sequence[str]) -> Submission:
        """One of this moment and machine."""
        if scheduler not in SCHEDULERS:
            raise ValueError(f"scheduler {scheduler!r} is none of {', '.join(SCHEDULERS)}")
        time = datetime.now().astimezone().isoformat(timespec="seconds")
        return cls(job_id, scheduler, tuple(command), time, platform.node())


def write(folder: OwnRun, submission: Submission) -> None:
    """Write submission.json, whole or not at all. Raises OSError."""
    folder.write_json(folder.submission, {"schema": 1, **asdict(submission)})


def read(folder: RunFolder) -> Submission | None:
    """Return what submission.json says; None if there is none. Raises UserError if it is damaged, OSError."""
    try:
        found: dict[str, Any] = read_json(folder.submission, folder.path)
        return Submission(
            job_id=str(found["job_id"]),
            scheduler=str(found["scheduler"]),
            command=tuple(str(word) for word in found["command"]),
            time=str(found["time"]),
            host=str(found.get("host", "")),
        )
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"this file is damaged ({type(error).__name__}: {error})",
            where=str(folder.submission),
            todo="find the job with `squeue --me`, or with sacct: its name is `name` in job.yaml",
        ) from error
