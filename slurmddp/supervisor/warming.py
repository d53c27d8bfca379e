"""The step of the warm processes (recovery.spares_warm): one on each node, spares too, for all attempts.

Each has imported torch, and the agents of all attempts are forked from it: see slurmddp/runtime/agent/warm_parent.py.
Where one is missing, an agent starts as ever, and its event says why.
"""

import os
from typing import Any


def keep(job: Any) -> None:
    """Start it on all nodes, unless it runs. It ends with the job, or by the cleanup of `SLURMDDP_WARM`."""
    nodes = job.nodes.usable
    if not nodes or (job.warm is not None and job.warm.code is None):
        return
    name = "{}-{}-warm".format(os.path.basename(job.run), job.scheduler.job_id)
    job.env["SLURMDDP_WARM"], logs = name, job.run + "/logs/warm"
    options = [
        "--nodelist=" + ",".join(nodes),
        "--overlap",
        "--no-kill",
        "--kill-on-bad-exit=0",
        "--cpu-bind=none",
        *job.step_options,
    ]
    step = job.scheduler.step(nodes, options, logs + "/%N.log", job.values.node_script())
    env = {"SLURMDDP_RENDEZVOUS_ID": name, "SLURMDDP_LOGS": logs, "SLURMDDP_PORT": "0"}
    words = ["bash", "-c", 'mkdir -p "$0" && exec "$@" 2>>"$0/srun.err"', logs, *step]
    job.warm = job.loop.start(words, dict(job.env, SLURMDDP_NODES=str(len(nodes)), **env))
