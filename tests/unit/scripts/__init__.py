"""Tests of what slurmddp says about other people's batch scripts."""

import pytest

from slurmddp.scripts.sandbox.evaluate import available

needs_namespaces = pytest.mark.skipif(not available(), reason="this machine gives no user namespaces")
