"""Another user of the same machine, played by a process that root starts."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest

#: nobody
UID = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="becoming another user takes root")


@contextlib.contextmanager
def stranger(act: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """Run act(pipe, *arguments) as nobody; yield our end of the pipe."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_become, args=(act, theirs, *arguments), daemon=True)
    process.start()
    theirs.close()  # so that reading fails when that process ends
    try:
        yield ours
    finally:
        process.kill()
        process.join()


def _become(act: Callable[..., None], pipe: Connection, *arguments: Any) -> None:
    "".encode("idna")  # sockets import it, perhaps from a folder that nobody cannot open
    os.setgroups([])
    os.setgid(UID)
    os.setuid(UID)
    with contextlib.suppress(EOFError):  # the test is over
        act(pipe, *arguments)
