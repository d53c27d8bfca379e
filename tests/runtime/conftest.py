"""The pool of ranks, made once for all tests of this folder."""

from collections.abc import Iterator

import pytest

from .harness import POOL, Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """A pool of three ranks."""
    pool = Ranks(POOL)
    yield pool
    pool.close()
