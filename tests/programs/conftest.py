"""A desk for each test, the `slurmddp` command in this process, and no torch."""

from tests.fixtures import cli, desk, without_torch  # noqa: F401 - pytest finds them here
