"""What doctor says of a run."""

from slurmddp.doctor.diagnose import Diagnosis, Examination
from slurmddp.doctor.sources import read_run
from slurmddp.run.layout import RunFolder


def diagnose_run(folder: RunFolder) -> Diagnosis:
    """Return the diagnosis of one run. Raises UserError without any logs."""
    found = Examination()
    read_run(found, folder)
    return found.diagnose()
