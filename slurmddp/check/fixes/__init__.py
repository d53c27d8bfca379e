"""What corrects the findings, by subject. Importing this package registers it, in the order in which it is tried."""

from slurmddp.check.fixes import text  # isort: skip
from slurmddp.check.fixes import slurm  # isort: skip
from slurmddp.check.fixes import launchers  # isort: skip
from slurmddp.check.fixes import rendezvous  # isort: skip
from slurmddp.check.fixes import ranks  # isort: skip

__all__ = ["launchers", "ranks", "rendezvous", "slurm", "text"]
