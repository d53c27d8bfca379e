"""The programs of a run, which python.sh starts out of the run's archive: PROGRAM ARGUMENT...

All modules are loaded before anything starts: a run folder that is purged later does not stop a running job.
"""

import importlib
import signal
import sys

#: The exit code for a copy of the code that is not complete, which job.sh tells of.
INCOMPLETE = 97
#: The module of each program. job: on the batch host. guard: there, or on each node. sweep: on the nodes of an attempt.
#: watchdog: a job of its own. alert: sends one. ranks: on their nodes, for `debug stacks` and `check --rehearse`. node,
#: fail, mounts, python, container: for node.sh. save: beside the job, finds what the ranks may load.
PROGRAMS = {
    "job": "order",
    "guard": "guard",
    "sweep": "sweep",
    "watchdog": "watchdog",
    "alert": "notify",
    "ranks": "ranks",
    "node": "node",
    "fail": "node:fail",
    "mounts": "node_checks:mounts",
    "python": "node_checks:python",
    "container": "image_mount",
    "save": "save",
}


def main() -> None:
    """Run the program that the command line names."""
    if sys.argv[1:2] == ["guard"]:  # until it has its handlers: a SIGTERM of its first moments would end it
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    try:
        module, _, function = PROGRAMS[sys.argv[1]].partition(":")
        program = importlib.import_module("slurmddp.supervisor." + module)
    except Exception as error:  # noqa: BLE001 - a damaged archive raises any
        print("job.sh: {}: {}".format(type(error).__name__, error), file=sys.stderr)
        sys.exit(INCOMPLETE)
    sys.exit(getattr(program, function or "main")(sys.argv[2:]))
