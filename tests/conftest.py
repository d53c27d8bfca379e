"""For all tests: hypothesis measures no time here (a busy machine is no defect), and CI tries the same each time.

Chance looks for what nobody thought of wherever else the tests run; in CI, what chance finds would be laid to a change
that has nothing to do with it.
"""

import os
import signal

from hypothesis import settings

from tests.reruns import pytest_sessionfinish, pytest_terminal_summary  # noqa: F401 - pytest finds them here

settings.register_profile("slurmddp", deadline=None, derandomize="SLURMDDP_REQUIRE_CLUSTER" in os.environ)
settings.load_profile("slurmddp")

# Under nohup, and in a shell's background, Ctrl-C is ignored: programs that tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
