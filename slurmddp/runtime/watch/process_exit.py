"""How a process ends at once, and what it says before: its stacks. Works from any thread."""

import contextlib
import faulthandler
import multiprocessing
import os
import sys
import threading
from typing import NoReturn


def say(text: str) -> None:
    """Write to stderr in one piece, so that lines of several ranks do not mix; never fails."""
    with contextlib.suppress(OSError, ValueError):  # Whoever read it may be gone.
        sys.stderr.write(text)
        sys.stderr.flush()


def end_workers() -> None:
    """Kill data workers that are still there.

    They ignore SIGTERM, which is all that Python sends before it waits for them at exit: for ever, where one
    hangs in a read.
    """
    for child in multiprocessing.active_children():
        child.kill()


def leave(code: int) -> NoReturn:
    """End this process at once.

    Interpreter shutdown is skipped on purpose: destructors of process groups and of data loaders may wait
    for ranks that are gone, and torchrun would wait for us.
    """
    try:
        end_workers()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    finally:
        os._exit(code)


def leave_within(seconds: float, code: int) -> None:
    """End this process in so many seconds, even if a log or a file system blocks what is done until then."""
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()


def stacks(prefix: str) -> str:
    """Return the stacks of all threads, `prefix` before each line.

    faulthandler's form: it reads no source files, which may lie on the very file system that hangs.
    """
    with open(os.memfd_create("stacks"), "w+b") as memory:
        faulthandler.dump_traceback(memory, all_threads=True)
        memory.seek(0)
        lines = memory.read().decode(errors="replace").splitlines()
    return "".join(f"{prefix}: {line}\n" for line in lines)
