"""Errors of the user's program before its first step: where every rank meets one, no further start will help.

A missing module, a misspelt name and a wrong argument are the same at the next start. One rank alone may be on a node
that lacks something, so that another start may help: it takes all ranks. Each rank notes its error in the run folder
and waits for the others; rank 0 counts, and writes the marker that ends the run. Standard library only.
"""

import contextlib
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

from slurmddp.runtime import environment
from slurmddp.runtime.errors import UserError
from slurmddp.runtime.watch import failures, marker
from slurmddp.runtime.watch.process_exit import say
from slurmddp.shared.run_folder import RunFolder

KINDS = (ImportError, SyntaxError, NameError, UserError)
USAGE = 2
"""The exit code of argparse, and of most others, for wrong arguments."""

#: Seconds that a rank waits for the others to fail as well, and after which a script that tells no steps has made some.
_WAIT, _EARLY = 15.0, 600.0
#: What an ImportError says of a file system or a device that may be well again at the next start.
_PASSING = re.compile(
    "input/output error|stale file handle|transport endpoint|timed out|connection|no space left|cannot allocate"
    "|resource temporarily|(cuda|nccl|hip) error",
    re.IGNORECASE,
)


def note(error: BaseException | None, environ: Mapping[str, str] = os.environ, root: Path | None = None) -> None:
    """Before a rank ends by `error`: note it, and wait until all ranks have, or some seconds. Never raises.

    error: None for exit code 2. root: the run folder where SLURMDDP_RUN does not say. Does nothing for an error that
    may pass, after the first step, or outside of a run.
    """
    try:
        root = root or Path(environ["SLURMDDP_RUN"])
        rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        attempt = int(environ.get("SLURMDDP_ATTEMPT", "0"))
        early = failures.step_of(root, environ) == 0 and environment.seconds_since_start() < _EARLY
        if early and (error is None or stays(error)):
            _count(root, attempt, environment.which_start(environ), rank, size, _text(error, environ))
    except (KeyError, ValueError):
        return  # Nobody started these ranks for us.
    except OSError as failed:
        say(f"slurmddp: warning: cannot count the error of this start: {failed}\n")


def stays(error: BaseException) -> bool:
    """Return whether the next start would fail alike: False if any error in the chain is one of files or network."""
    if not isinstance(error, KINDS):
        return False
    link: BaseException | None = error
    while link is not None:
        if _PASSING.search(str(link)) or (isinstance(link, OSError) and not isinstance(link, FileNotFoundError)):
            return False
        link = link.__cause__ or link.__context__
    return True


def _text(error: BaseException | None, environ: Mapping[str, str]) -> str:
    if error is not None:
        return f"{type(error).__name__}: {error}"
    text = f"the program exited with code {USAGE} before its first step (wrong arguments?); see its log"
    say(f"slurmddp: node {environ.get('SLURMDDP_NODE', 'here')}: {text}\n")
    return text


def _count(root: Path, attempt: int, start: str, rank: int, size: int, text: str) -> None:
    over = RunFolder(root).marker(attempt)
    folder = over.with_name(f"attempt-{attempt:03d}.errors") / f"start-{start}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / str(rank)).write_text(f"{text}\n", encoding="utf-8", errors="replace")
    everybody = {str(number) for number in range(size)}
    until = time.monotonic() + _WAIT
    while time.monotonic() < until:
        if rank == 0 and everybody <= set(os.listdir(folder)):
            # First the message: the other ranks exit when they see the marker, and torchrun then kills this one.
            say("slurmddp: all ranks failed this way before the first step, so the run is not restarted\n")
            marker.give_up(over, attempt, text)
            return
        if rank != 0:
            with contextlib.suppress(OSError):
                if marker.ended(over):
                    return
        time.sleep(0.1)
