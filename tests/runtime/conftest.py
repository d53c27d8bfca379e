"""The pool of ranks, made once for all tests of this folder."""

import multiprocessing
from collections.abc import Iterator

import pytest

from .harness import POOL, Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """A pool of three ranks."""
    pool = Ranks(POOL)
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def no_data_worker_is_left() -> Iterator[None]:
    """After a test whose loader raised, pytest's traceback still holds its workers. They ignore SIGTERM, which is all
    that Python sends before it waits for them at exit: for ever. (The entrypoint kills them: watch/process_exit.py.)
    """
    yield
    for child in multiprocessing.active_children():
        if child.daemon:  # The pool's ranks, and those of saving.start, are none.
            child.kill()
            child.join()
