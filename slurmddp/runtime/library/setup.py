"""Set-up and tear-down of a distributed script."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch.distributed as dist

from slurmddp.records.marker import STOPPED, Marker
from slurmddp.runtime import train
from slurmddp.runtime.environment import Environment
from slurmddp.runtime.journal import Events
from slurmddp.runtime.library import shared, signals
from slurmddp.runtime.watch import marker, usererrors
from slurmddp.runtime.watch.process_exit import leave, say
from slurmddp.runtime.watch.watch import Watch
from slurmddp.runtime.world import World
from slurmddp.shared.run_folder import RunFolder


@contextmanager
def distributed(*, timeout: float = 600, backend: str | None = None) -> Iterator[World]:
    """Join the process group, and leave it when the block ends. Put all of a script's work inside:

    >>> from slurmddp.runtime import distributed
    >>> with distributed() as world:
    ...     print(f"rank {world.rank} of {world.size} on {world.device.type}, main: {world.is_main}")
    ...     print(world.broadcast({"answer": 42}), world.gather(world.rank))
    rank 0 of 1 on cpu, main: True
    {'answer': 42} [0]

    or decorate its main function with `@distributed()`. Under torchrun there is one process per rank; alone, one rank.

    Args:
        timeout: seconds that one collective of training may take.
        backend: default: nccl if there are GPUs (rank n of a node uses its GPU n), else gloo. "gloo" uses the CPU.

    Returns:
        A World with rank, size, local_rank, node, attempt, device and is_main. Its broadcast(value) sends a value from
        rank 0, and its gather(value) collects those of all ranks. Values are JSON: numbers, strings, lists, dicts (a
        tuple arrives as a list). They use their own gloo group, and are never pickled.

    - Stopping: SIGTERM, SIGUSR1, SIGUSR2 and the run's stop file only ask to stop, see should_stop. A rank exits by
      itself if its torchrun is gone, or if it makes no progress after a SIGTERM. A call of should_stop or of a method
      of Checkpointer is progress.
    - Data workers must ignore these signals, or they die before the ranks have saved:
      DataLoader(..., worker_init_fn=slurmddp.runtime.ignore_signals).
    - An exception inside the block exits this process at once, with code 1 and one message. So no destructor waits for
      ranks that are gone. torchrun then stops the other ranks. sys.exit(0) is a clean exit.
    - A clean exit waits for checkpoints that are being written. If the ranks were asked to stop, it writes a marker to
      the run folder. If torchrun then restarts a rank in this attempt, it reads the marker and exits with 0.
    """
    env: Environment | None = None
    events: Events | None = None
    folder = shared.run_folder()
    ending: SystemExit | None = None
    try:
        env = shared.rank_environment()
        if _is_over(folder, env):  # torchrun starts all ranks anew when one fails, even if the others have ended well
            if env.rank == 0:
                print(f"attempt {env.attempt} is already over: nothing to do", flush=True)
            leave(0)
        watch = Watch(env, shared.stop_of(env), over=partial(_is_over, folder, env))
        signals.take(watch)  # before the ranks meet
        joined = shared.join(env, timeout=timeout, backend=backend)
        watch.enter("start", 0)
        events = shared.events_of(env)
        now = shared.Shared(joined, watch.stop, watch, events)
        shared.use(now)
        try:
            yield joined
        except SystemExit as exit_:
            if exit_.code not in (None, 0):
                raise
            ending = exit_
        _finish(now, folder)
    except SystemExit as exit_:
        _leave(exit_)
    except BaseException as error:  # noqa: BLE001 - whatever it is: say so, and be gone at once
        train.fail(error, env, events)
    if ending is not None:
        raise ending


def _is_over(folder: RunFolder | None, env: Environment) -> bool:
    return folder is not None and marker.ended(folder.marker(env.attempt))


def _finish(now: shared.Shared, folder: RunFolder | None) -> None:
    for finish in now.finishing:
        finish()
    now.enter("end")
    if now.stopped is not None and folder is not None:
        attempt = now.world.attempt
        stopped = Marker(STOPPED, now.stopped, signal=now.stop.signal, step=now.step)
        now.world.on_main(lambda: marker.write(folder.marker(attempt), attempt, stopped))
    assert now.watch is not None
    now.watch.close(now.world)
    dist.destroy_process_group()
    shared.use(None)
    if now.stopped is None:
        # Else the process is on its way out, and what is sent to it now must not turn a clean end into a failure.
        signals.give_back()


def _leave(exit_: SystemExit) -> None:
    if exit_.code == usererrors.USAGE:
        usererrors.note(None)
    if isinstance(exit_.code, int):
        leave(exit_.code)
    say(f"{exit_.code}\n")
    leave(1)
