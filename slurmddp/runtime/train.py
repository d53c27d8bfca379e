"""The bundled entrypoint, started by torchrun on every rank: python -m slurmddp.runtime.train RUN_DIR."""

import multiprocessing
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import NoReturn

from slurmddp.runtime import environment, job
from slurmddp.runtime.errors import RuntimeFailure, UserError
from slurmddp.runtime.folder import RunFolder
from slurmddp.runtime.journal import Events


def main(arguments: list[str]) -> None:
    """Train as RUN_DIR/job.json says. Returns after a clean end; any failure ends the process with code 1."""
    place: environment.Environment | None = None
    events: Events | None = None
    try:
        # torch says so at import, on every rank, where numpy is not installed; nothing here needs it.
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
        from slurmddp.runtime import loop, world

        place = environment.read()
        if len(arguments) != 1:
            raise UserError("usage: python -m slurmddp.runtime.train RUN_DIR (under torchrun)")
        folder = RunFolder(Path(arguments[0]).resolve())
        wanted = job.load(folder.job)
        events = Events(folder.events, attempt=place.attempt, node=place.node, rank=place.rank)
        joined = world.start(place, timeout=wanted.timeouts.collective)
        loop.run(folder, wanted, joined, place, events)
        world.finish()
        _end_workers()
    except BaseException as error:  # noqa: BLE001 - whatever it is: say so, and be gone at once
        fail(error, place, events)


def fail(error: BaseException, place: environment.Environment | None, events: Events | None) -> NoReturn:
    """Report an error and end this process with code 1 at once.

    Interpreter shutdown is skipped on purpose: destructors of process groups and of data loaders may wait
    for ranks that are gone, and torchrun would wait for us.
    """
    try:
        if _speaks(error, place):
            _report(error, place)
            if events is not None:
                events.write("error", kind=type(error).__name__, message=str(error) or repr(error))
    finally:
        _end_workers()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _end_workers() -> None:
    """Kill data workers that are still there.

    They ignore SIGTERM, which is all that Python sends before it waits for them at exit: for ever, where one
    hangs in a read.
    """
    for child in multiprocessing.active_children():
        child.kill()


def _speaks(error: BaseException, place: environment.Environment | None) -> bool:
    """One message for what all ranks know: rank 0, or one rank a node before they have met."""
    if place is None:
        return os.environ.get("LOCAL_RANK", "0") == "0"
    if isinstance(error, UserError | RuntimeFailure) and error.shared:
        return place.rank == 0
    if isinstance(error, UserError):
        return place.local_rank == 0
    return True


def _report(error: BaseException, place: environment.Environment | None) -> None:
    where = f"rank {place.rank} on {place.node}" if place else "slurmddp"
    if isinstance(error, UserError | RuntimeFailure):
        text = f"{where}: error: {error}\n"
    else:
        text = "".join(f"{where}: {line}\n" for line in "".join(traceback.format_exception(error)).splitlines())
    sys.stderr.write(text)  # In one piece: lines of several ranks do not mix.
    sys.stderr.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
