"""submission.json: how the run was submitted, and what the scheduler answered."""

import platform
from datetime import datetime
from typing import Any, Dict, NamedTuple, Sequence, Tuple

VERSION = 1
SCHEDULERS = ("slurm", "local", "allocation")


class Submission(NamedTuple):
    """How a run was handed over."""

    #: `123`, `123;cluster` or `local-PID-STARTTIME`; of the surrounding job for an allocation; empty while sbatch has
    #: not answered: this is written before it is called, and the job may be in the queue
    job_id: str
    scheduler: str  # slurm (sbatch), local (a process of this machine), allocation (`slurmddp run` inside a job)
    command: Tuple[str, ...]  # the command line that was run
    time: str  # when, ISO 8601 with zone
    host: str  # on which machine (a local process is found only there)
    failed: str = ""  # why sbatch gave no answer; empty if it did, and while it is waited for

    @property
    def queued(self) -> bool:
        """Return whether it was handed to sbatch."""
        return self.scheduler == "slurm"

    @property
    def local(self) -> bool:
        """Return whether it is a process of one machine."""
        return self.scheduler == "local"

    @property
    def inside(self) -> bool:
        """Return whether the run is only a part of its job."""
        return self.scheduler == "allocation"

    def write(self) -> Dict[str, Any]:
        return dict(self._asdict(), schema=VERSION)


def now(job_id: str, scheduler: str, command: Sequence[str]) -> Submission:
    """Return the submission of this moment and machine."""
    if scheduler not in SCHEDULERS:
        raise ValueError("scheduler {!r} is none of {}".format(scheduler, ", ".join(SCHEDULERS)))
    moment = datetime.now().astimezone().isoformat(timespec="seconds")
    return Submission(job_id, scheduler, tuple(command), moment, platform.node())


def read(record: Any) -> Submission:
    """Return what an object says. Raises ValueError with what is wrong, for people."""
    if not isinstance(record, dict):
        raise ValueError("it is no object")
    for key in ("job_id", "scheduler", "time"):
        if not isinstance(record.get(key), str):
            raise ValueError("{} is missing, or is no text".format(key))
    command = record.get("command")
    if not isinstance(command, list):
        raise ValueError("command is missing, or is no list")
    host = str(record.get("host") or "")
    failed = str(record.get("failed") or "")
    return Submission(record["job_id"], record["scheduler"], tuple(map(str, command)), record["time"], host, failed)
