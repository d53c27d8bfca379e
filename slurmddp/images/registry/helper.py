"""Asks one of Docker's credential helpers, the program docker-credential-NAME, for a user name and a password.

It gets the registry's address on stdin and prints JSON (docker/docker-credential-helpers). Nothing that it prints is
shown, since it may hold a secret.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import selectors
import shutil
import signal
import subprocess
import time
from functools import partial
from typing import NamedTuple

PATIENCE = 10.0
LARGEST = 1 << 16
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class HelperError(Exception):
    """Why a helper gave no user name and password: "which ..."."""


class HelperAnswer(NamedTuple):
    """server: whose user name and password these are; "" if the helper does not say."""

    server: str
    username: str
    password: str


def ask_helper(name: str, server: str) -> HelperAnswer:
    """Run `docker-credential-NAME get`, for at most PATIENCE seconds and LARGEST bytes. Raises HelperError."""
    path = shutil.which(f"docker-credential-{name}") if _NAME.fullmatch(name) else None
    if path is None or not os.path.isabs(path):  # A relative PATH would run a program of the working directory
        raise HelperError("which is not in PATH")
    try:
        code, output = _run(path, server)
    except OSError as error:
        raise HelperError(f"which cannot be run: {error.strerror}") from None
    if code:
        raise HelperError(f"which has no credentials for it (exit code {code})")
    try:
        tree = json.loads(output)
        answer = HelperAnswer(*(tree.get(key) or "" for key in ("ServerURL", "Username", "Secret")))
    except (ValueError, AttributeError, RecursionError):
        answer = HelperAnswer("", "", "")
    if not all(isinstance(text, str) for text in answer) or not (answer.username and answer.password):
        raise HelperError("which gave an invalid answer")
    if answer.username == "<token>":
        raise HelperError("which has a token, but slurmddp supports only user name and password")
    return answer


def _run(path: str, server: str) -> tuple[int, bytes]:
    """Return exit code and output. Raises OSError and HelperError."""
    deadline = time.monotonic() + PATIENCE
    output = bytearray()
    # Its own session, so that the processes that it starts can be ended with it
    with (
        subprocess.Popen(
            [path, "get"],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as child,
        selectors.DefaultSelector() as waiting,
    ):
        assert child.stdin and child.stdout
        end = partial(os.killpg, child.pid, signal.SIGKILL)
        atexit.register(end)  # Ctrl-C ends the main thread, and then this one where it is
        try:
            with contextlib.suppress(BrokenPipeError):  # A helper may answer without reading
                child.stdin.write(server.encode())
            child.stdin.close()
            waiting.register(child.stdout, selectors.EVENT_READ)
            while (left := deadline - time.monotonic()) > 0 and waiting.select(left):
                piece = os.read(child.stdout.fileno(), LARGEST)
                output += piece
                if len(output) > LARGEST:
                    raise HelperError(f"which printed more than {LARGEST >> 10} KiB")
                if not piece:
                    return child.wait(max(0.0, deadline - time.monotonic())), bytes(output)
            raise subprocess.TimeoutExpired(path, PATIENCE)
        except BaseException as error:
            end()
            if isinstance(error, subprocess.TimeoutExpired):
                raise HelperError(f"which gave no answer within {PATIENCE:g} s") from None
            raise
        finally:
            atexit.unregister(end)
