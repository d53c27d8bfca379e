"""What corrects the findings, by subject. Importing this package registers it, in the order in which it is tried."""

from slurmddp.scripts.check.fixes import text  # isort: skip
from slurmddp.scripts.check.fixes import launches  # isort: skip

__all__ = ["launches", "text"]
