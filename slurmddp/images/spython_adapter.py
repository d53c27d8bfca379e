"""The one place that drives spython, which reads an image's labels; each of its failures becomes one of our errors.

spython drives only a binary called `singularity`, so Apptainer under its own name is asked directly. What is guarded
against was tried with spython 0.3.14: inspect returns a dict on failure too, and may raise SystemExit or whatever its
JSON parsing raises. Three things do not go through spython:
- the version: its helper returns '' or a dict on failure, and obeys SPYTHON_SINGULARITY_VERSION;
- Dockerfiles: its parser reads few of them right (see dockerfile/ and its tests);
- builds: they need a clean environment and a way to stop them (see builder.py).
"""

import json
import os
import re
import subprocess
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TypeVar

from slurmddp.errors import ExternalError

_PASSED = re.compile(
    # what any program needs, and what modules set for the builder itself
    r"PATH|HOME|USER|LOGNAME|SHELL|TERM|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|XDG_RUNTIME_DIR|LD_LIBRARY_PATH"
    # the way to the internet, which %post needs, too
    r"|(?i:(https?|ftp|all|no)_proxy)|SSL_CERT_(FILE|DIR)"
    # where and how it builds; its binds, variables and passwords are not among them
    r"|(APPTAINER|SINGULARITY)_(CACHEDIR|TMPDIR|DISABLE_CACHE|CONFIGDIR|CONF(IG)?_FILE|IGNORE_\w+|MKSQUASHFS_\w+"
    r"|DEBUG|VERBOSE|MESSAGELEVEL|NOCOLOR)"
)


def passed_environment() -> dict[str, str]:
    """The variables of this process that a builder, and a program of an image, may see."""
    return {name: value for name, value in os.environ.items() if _PASSED.fullmatch(name)}


SPYTHON_BINARY = "singularity"
# A program of the image gets nothing of this machine's: neither files nor variables
_SHUT = ("--contain", "--no-home", "--cleanenv")

Result = TypeVar("Result")


def version_text(name: str) -> str:
    """Return what `<name> --version` says, such as "apptainer version 1.4.5". Raises ExternalError."""
    return _run([name, "--version"]).strip()


def labels(name: str, image: Path) -> dict[str, str]:
    """The image's labels, read by `<name> inspect`.

    Raises ExternalError where it is no image for that program.
    """
    command = f"{name} inspect {image}"
    if name == SPYTHON_BINARY:
        data = _guarded(command, lambda: import_module("spython.main").Client.inspect(image=str(image), quiet=True))
    else:
        text = _run([name, "inspect", "--json", "--labels", str(image)])
        data = _guarded(command, lambda: json.loads(text)["data"])
    if not isinstance(data, dict) or "attributes" not in data:
        message = " ".join(data["message"]).strip() if isinstance(data, dict) and "message" in data else str(data)
        raise ExternalError(f"`{command}` failed: {message}")
    attributes = data["attributes"] or {}
    return {str(key): str(value) for key, value in (attributes.get("labels") or {}).items()}


def output_in(name: str, image: Path, *command: str) -> str:
    """Return what a command of an image prints. Raises ExternalError if it fails, or no image can be run here."""
    return _run([name, "exec", *_SHUT, str(image), *command])


def _guarded(command: str, call: Callable[[], Result]) -> Result:
    """The call's result; whatever it raises, also SystemExit, becomes an ExternalError.

    spython hands this process's environment to the program, so meanwhile that is a small one.
    """
    kept, small = dict(os.environ), passed_environment()
    os.environ.clear()
    os.environ.update(small)
    try:
        return call()
    except ImportError:
        raise ExternalError("spython is missing from this installation: install slurmddp again") from None
    except FileNotFoundError as error:
        raise ExternalError(
            f"`{command}` failed: the program {error.filename or command.split()[0]} does not exist"
        ) from None
    except (Exception, SystemExit) as error:
        raise ExternalError(f"`{command}` failed: {type(error).__name__}: {error}") from error
    finally:
        os.environ.update(kept)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command,
            env=passed_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise ExternalError(f"`{' '.join(command)}` failed: {error.strerror}") from None
    if done.returncode != 0:
        output = (done.stderr or done.stdout).strip()
        raise ExternalError(f"`{' '.join(command)}` failed with exit code {done.returncode}: {output}")
    return done.stdout
