"""A real Slurm and Apptainer cluster of five hosts on one machine, for tests. README.md says how to use it.

with Cluster.started() as cluster:
    cluster.run("login", ["sinfo"])
"""

from .cluster import Cluster
from .errors import ClusterError, ClusterUnavailable

__all__ = ["Cluster", "ClusterError", "ClusterUnavailable"]
