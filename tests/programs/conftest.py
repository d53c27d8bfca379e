"""A desk for each test, and no torch in this process."""

from tests.fixtures import desk, without_torch  # noqa: F401 - pytest finds them here
