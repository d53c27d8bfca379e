"""The program that job.sh starts: python3 -I RUN_FOLDER/code/slurmddp/supervisor/__main__.py, with what `values` reads.

All modules are loaded before anything starts: a run folder that is purged later does not stop a running job.
"""

import os
import sys

#: The exit code for a copy of the code that is not complete, which job.sh tells of.
INCOMPLETE = 97

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    try:
        from slurmddp.causes.rules import rules
        from slurmddp.supervisor.order import main

        rules()
    except (ImportError, OSError) as error:
        print("job.sh: {}".format(error), file=sys.stderr)
        sys.exit(INCOMPLETE)
    sys.exit(main(sys.argv[1:]))
