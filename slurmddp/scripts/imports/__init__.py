"""`slurmddp import`: a job file from a batch script that slurmddp did not write."""
