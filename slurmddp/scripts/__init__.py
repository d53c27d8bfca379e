"""Batch scripts that slurmddp did not write: check and correct them, import them."""
