"""submission.json in the run folder."""

from slurmddp.errors import UserError
from slurmddp.records import submission
from slurmddp.records.submission import Submission
from slurmddp.run.gate import OwnRun
from slurmddp.run.layout import RunFolder
from slurmddp.shared.files import read_json


def write(folder: OwnRun, sent: Submission) -> None:
    """Write submission.json, whole or not at all. Raises OSError."""
    folder.write_json(folder.submission, sent.write())


def read(folder: RunFolder) -> Submission | None:
    """Return what submission.json says; None if there is none. Raises UserError if it is damaged, OSError."""
    try:
        return submission.read(read_json(folder.submission, folder.path))
    except FileNotFoundError:
        return None
    except ValueError as error:
        todo = "find the job with `squeue --me`, or with sacct: its name is `name` in job.yaml"
        raise UserError(f"this file is damaged: {error}", where=str(folder.submission), todo=todo) from error
