"""The programs of a run: python3 -I RUN_FOLDER/code/slurmddp/supervisor/__main__.py PROGRAM ARGUMENT...

All modules are loaded before anything starts: a run folder that is purged later does not stop a running job.
"""

import importlib
import os
import signal
import sys

#: The exit code for a copy of the code that is not complete, which job.sh tells of.
INCOMPLETE = 97
#: The module of each program. job: on the batch host. guard: there, or on each node. sweep: on the nodes of an attempt.
#: watchdog: a job of its own. alert: sends one. ranks: on their nodes, for `slurmddp stacks` and `rehearse`.
PROGRAMS = {
    "job": "order",
    "guard": "guard",
    "sweep": "sweep",
    "watchdog": "watchdog",
    "alert": "notify",
    "ranks": "ranks",
}

if __name__ == "__main__":
    if sys.argv[1:2] == ["guard"]:  # until it has its handlers: a SIGTERM of its first moments would end it
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    try:
        program = importlib.import_module("slurmddp.supervisor." + PROGRAMS[sys.argv[1]])
    except (ImportError, OSError) as error:
        print("job.sh: {}".format(error), file=sys.stderr)
        sys.exit(INCOMPLETE)
    sys.exit(program.main(sys.argv[2:]))
