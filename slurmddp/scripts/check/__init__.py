"""Check batch scripts that slurmddp did not write."""
