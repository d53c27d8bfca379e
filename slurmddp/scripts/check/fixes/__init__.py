"""What corrects the findings, by subject. Importing this package registers it, in the order in which it is tried."""

from slurmddp.scripts.check.fixes import text  # isort: skip
from slurmddp.scripts.check.fixes import slurm  # isort: skip
from slurmddp.scripts.check.fixes import launchers  # isort: skip
from slurmddp.scripts.check.fixes import rendezvous  # isort: skip
from slurmddp.scripts.check.fixes import ranks  # isort: skip

__all__ = ["launchers", "ranks", "rendezvous", "slurm", "text"]
