"""The run's key, for what runs on the nodes: see slurmddp/records/signed.py."""

from pathlib import Path

from slurmddp.records import signed
from slurmddp.records.signed import ForgedError as ForgedError
from slurmddp.records.signed import Key as Key
from slurmddp.runtime.errors import UserError
from slurmddp.shared.run_folder import RunFolder


def load(run: Path) -> Key:
    """Return the key of a run folder. Raises UserError if it is missing, or somebody else may know or have made it."""
    folder = RunFolder(run)
    try:
        return signed.load(str(folder.key), str(folder.pair))
    except signed.UnsafeKeyError as error:
        raise UserError(str(error)) from error
