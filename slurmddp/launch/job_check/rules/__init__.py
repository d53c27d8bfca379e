"""The rules, by what they are about."""

from slurmddp.launch.job_check.rules import cluster, files, network

__all__ = ["cluster", "files", "network"]
