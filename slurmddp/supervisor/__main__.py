"""The programs of a run: python3 -I RUN_FOLDER/code/slurmddp/supervisor/__main__.py PROGRAM ARGUMENT...

All modules are loaded before anything starts: a run folder that is purged later does not stop a running job.
"""

import importlib
import os
import sys

#: The exit code for a copy of the code that is not complete, which job.sh tells of.
INCOMPLETE = 97
#: By the program's name: its module. job: what job.sh starts on the batch host. guard: on its node or on all nodes.
PROGRAMS = {"job": "order", "guard": "guard"}

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    try:
        from slurmddp.causes.rules import rules

        program = importlib.import_module("slurmddp.supervisor." + PROGRAMS[sys.argv[1]])
        rules()
    except (ImportError, OSError) as error:
        print("job.sh: {}".format(error), file=sys.stderr)
        sys.exit(INCOMPLETE)
    sys.exit(program.main(sys.argv[2:]))
