"""The bundled entrypoint, started by torchrun on every rank: python -m slurmddp.runtime.train RUN_DIR."""

import atexit
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path
from typing import NoReturn

from slurmddp.records.rank_events import Error, RankStarted
from slurmddp.records.tuning import REQUEST
from slurmddp.runtime import environment, job
from slurmddp.runtime.errors import NamedError, NotFiniteError, UserError
from slurmddp.runtime.journal import Events
from slurmddp.runtime.watch import failures, marker, usererrors
from slurmddp.runtime.watch.process_exit import end_workers, leave, say
from slurmddp.runtime.watch.stop import Stop
from slurmddp.runtime.watch.watch import Watch
from slurmddp.shared.run_folder import RunFolder

#: What the same ranks would meet again, however often they started: of no use to repeat.
FINAL = (UserError, NotFiniteError)
#: Characters of a message in an event: a line of events.jsonl that is too long is not read.
LONGEST = 10_000
#: Seconds that a rank which does not speak waits for the one that does, at most.
SPEAKER_PATIENCE = 10


def main(arguments: list[str]) -> None:
    """Train as RUN_DIR/job.json says. Returns after a clean end; any failure ends the process with code 1."""
    env: environment.Environment | None = None
    events: Events | None = None
    folder: RunFolder | None = None
    try:
        environment.number_start()
        env = environment.read()
        if len(arguments) != 1:
            raise UserError("usage: python -m slurmddp.runtime.train RUN_DIR (under torchrun)")
        folder = RunFolder(Path(arguments[0]).resolve())
        watch = _watch(folder, env)
        if marker.ended(folder.marker(env.attempt)):
            # A shortcut only: ranks to which the file system does not show the marker yet look for it while they
            # wait for this one (Watch), and those that have met decide together (loop.run).
            if env.rank == 0:
                print(f"attempt {env.attempt} is already over: nothing to do")
            return
        if env.rank == 0 and (why := failures.begin(folder.path, env.attempt)):
            say(f"rank 0 on {env.node}: error: {why}\n")
            return  # The others read the marker.
        # torch says so at import, on every rank, where numpy is not installed; nothing here needs it.
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
        from slurmddp.runtime import loop, world

        wanted = job.load(folder.job_json)
        events = Events(folder.events, attempt=env.attempt, node=env.node, rank=env.rank)
        if env.rank == 0:
            events.write(RankStarted(round(environment.seconds_since_start(), 3)))
        if (folder.path / REQUEST).exists():
            from slurmddp.runtime.tune.tuner import Tuner

            joined = Tuner(folder, wanted, env, events, watch).run()
        else:
            joined = world.start(env, timeout=wanted.timeouts.collective)
            watch.enter("start", 0)
            watch.connect(joined, wanted.timeouts, events)
            loop.run(folder, wanted, joined, env, events, watch)
        watch.enter("end")
        watch.close(joined)
        world.finish()
        end_workers()
    except BaseException as error:  # noqa: BLE001 - whatever it is: say so, and be gone at once
        fail(error, env, events, folder)


def fail(
    error: BaseException, env: environment.Environment | None, events: Events | None, folder: RunFolder | None = None
) -> NoReturn:
    """Report an error and end this process with code 1 at once.

    `folder`: where the marker goes that says of a final error that the run is not to be started again.
    """
    try:
        if _speaks(error, env):
            _report(error, env)
            if events is not None:
                culprit = _culprit(error)
                # As one of the rank that made it, where another rank reports it.
                told = events.of(*culprit) if culprit else events
                told.write(Error(type(error).__name__, (str(error) or repr(error))[:LONGEST]))
        else:
            _wait_for_the_speaker()
        if not (folder and env and isinstance(error, FINAL)):
            usererrors.note(error, root=folder.path if folder else None)
        elif env.rank == 0 or not error.shared:
            marker.give_up(folder.marker(env.attempt), env.attempt, str(error))
    finally:
        leave(1)


def _watch(folder: RunFolder, env: environment.Environment) -> Watch:
    """Take signals before anything that takes long, such as importing torch."""
    # One rank a node looks at the shared file system.
    stop = Stop(env.stop_file if env.local_rank == 0 else None)
    watch = Watch(env, stop, over=lambda: marker.ended(folder.marker(env.attempt)))
    watch.install(parent="TORCHELASTIC_RUN_ID" in os.environ)  # Only torchrun's ranks cannot do without it.
    return watch


def _speaks(error: BaseException, env: environment.Environment | None) -> bool:
    """One message for what all ranks know: rank 0, or one rank a node before they have met."""
    if env is None:
        return os.environ.get("LOCAL_RANK", "0") == "0"
    if isinstance(error, NamedError) and error.shared:
        return env.rank == 0
    if isinstance(error, UserError):
        return env.local_rank == 0
    return True


def _wait_for_the_speaker() -> None:
    """Leave the rank that speaks the time to do so: torchrun ends it, unheard, once another one has exited."""
    end_workers()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)  # torchrun's, once the other has spoken
    time.sleep(SPEAKER_PATIENCE)


def _culprit(error: BaseException) -> tuple[int, str] | None:
    return error.culprit if isinstance(error, NotFiniteError) else None


def _report(error: BaseException, env: environment.Environment | None) -> None:
    rank, node = _culprit(error) or ((env.rank, env.node) if env else (0, ""))
    where = f"rank {rank} on {node}" if env else "slurmddp"
    if isinstance(error, NamedError):
        text = f"{where}: error: {error}\n"
    else:
        text = "".join(f"{where}: {line}\n" for line in "".join(traceback.format_exception(error)).splitlines())
    say(text)


if __name__ == "__main__":
    main(sys.argv[1:])
    atexit._run_exitfuncs()  # a task of the user's own may have some
    leave(0)  # The interpreter's own end takes seconds once torch is loaded: scancel may not leave that time.
