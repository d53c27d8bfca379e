"""Finds the root cause of a failure in logs, also of runs that slurmddp did not start."""
