"""What the pieces have in common in one process: the world, who asks to stop, and what has to be done at the end.

`distributed` makes it; where a script has made its process group itself, it is made around that one.
"""

import datetime
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from slurmddp.records.events import Facts
from slurmddp.records.rank_events import Stopping
from slurmddp.runtime import environment, world
from slurmddp.runtime.console import Console
from slurmddp.runtime.environment import Environment
from slurmddp.runtime.journal import Events
from slurmddp.runtime.library import signals
from slurmddp.runtime.measure.meter import reduction_device
from slurmddp.runtime.watch.failures import ProgressFile
from slurmddp.runtime.watch.stop import Stop
from slurmddp.runtime.watch.watch import Watch
from slurmddp.runtime.world import World
from slurmddp.shared.run_folder import RunFolder


@dataclass
class Shared:
    """One for each life of the process group.

    `stopped`: why, once the ranks have agreed to stop. `step`: the newest that any piece was told. `finishing`: what
    `distributed` calls before it ends.
    """

    world: World
    stop: Stop
    watch: Watch | None = None
    events: Events | None = None
    stopped: str | None = None
    step: int | None = None
    progress: ProgressFile | None = field(default_factory=lambda: progress_of(rank_environment()))
    finishing: list[Callable[[], None]] = field(default_factory=list)
    _group: object = field(default_factory=lambda: dist.group.WORLD)

    @property
    def alive(self) -> bool:
        """Return whether its process group is still the present one."""
        return dist.is_initialized() and dist.group.WORLD is self._group

    @property
    def console(self) -> Console:
        return Console(self.world.is_main)

    def enter(self, phase: str, step: int | None = None) -> None:
        """Tell the watch, where there is one, what the main thread does."""
        self.step = self.step if step is None else step
        if step is not None and self.progress is not None:
            self.progress.tell(step)
        if self.watch is not None:
            self.watch.enter(phase, step)

    def record(self, facts: Facts) -> None:
        """Write an event that is about the whole run, where there is a run folder; rank 0 does."""
        if self.events is not None and self.world.is_main:
            self.events.write(facts)

    def agree(self, *flags: bool) -> list[bool]:
        """Return each flag that any rank has set: a collective on the host, a fraction of a millisecond."""
        if self.world.size == 1:
            return list(flags)
        facts = torch.tensor([int(flag) for flag in flags])
        dist.all_reduce(facts, op=dist.ReduceOp.MAX, group=self.world.coordination)
        return [bool(fact) for fact in facts.tolist()]

    def agree_to_stop(self, *flags: bool) -> list[bool]:
        """Return whether any rank was asked to stop, and each of the other flags, in one reduction.

        From the step in which they agree on, all ranks know, and no further collective is needed for it.
        """
        stop, *others = self.agree(self.stop.wanted(), *flags)
        if stop and self.stopped is None:
            self.stopped = self.stop.agreed_reason(self.world)
            self.console.say(f"stopping   {self.stopped}")
            self.record(Stopping(self.step, self.stopped))
        return [self.stopped is not None, *others]


_now: Shared | None = None


def use(made: Shared | None) -> None:
    global _now
    _now = made


def get() -> Shared:
    """Return the state that `distributed` made, or a new one around the script's own process group.

    A process that is alone gets a group of one rank. If the script has made the group, every rank must make the first
    call.
    """
    if _now is not None and _now.alive:
        return _now
    env = rank_environment()
    if not dist.is_initialized():
        if env.world > 1:
            raise RuntimeError(
                f"this is rank {env.rank} of {env.world}, and there is no process group yet: "
                "use distributed(), or call torch.distributed.init_process_group first"
            )
        alone()
    stop = stop_of(env)
    signals.note(stop, env.rank, env.node)
    made = Shared(world.around(env, reduction_device()), stop, events=events_of(env))
    use(made)
    return made


def rank_environment() -> Environment:
    """Return rank and world of this process: from the process group, else from torchrun's variables, else alone."""
    if "RANK" in os.environ and not dist.is_initialized():
        return environment.read()
    told = {"RANK": "0", "WORLD_SIZE": "1"}
    if dist.is_initialized():
        told = {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    # Whoever starts ranks without torchrun may not tell these; then each of them looks for the stop file.
    return environment.read({"LOCAL_RANK": "0", **os.environ, **told})


def run_folder() -> RunFolder | None:
    """Return the folder of the run that this script belongs to; None if slurmddp did not start it."""
    root = os.environ.get("SLURMDDP_RUN")
    return RunFolder(Path(root)) if root else None


def stop_of(env: Environment) -> Stop:
    """One rank a node looks for the stop file."""
    return Stop(env.stop_file if env.local_rank == 0 else None)


def progress_of(env: Environment) -> ProgressFile | None:
    """Return where rank 0 tells the breaker how far the script has come; None if nobody asks."""
    path = os.environ.get("SLURMDDP_PROGRESS_FILE")
    return ProgressFile(Path(path)) if path and env.rank == 0 else None


def events_of(env: Environment) -> Events | None:
    """Return this rank's events, if there is a run folder."""
    folder = run_folder()
    return Events(folder.events, attempt=env.attempt, node=env.node, rank=env.rank) if folder else None


def join(env: Environment, *, timeout: float, backend: str | None) -> World:
    """Make the process group. Errors of the rendezvous pass through."""
    by_torchrun = "RANK" in os.environ
    if by_torchrun and backend is None:
        return world.start(env, timeout=timeout)
    device = torch.device("cpu")
    if torch.cuda.is_available() and backend != "gloo":
        device = torch.device("cuda", env.local_rank)
        torch.cuda.set_device(device)
    if by_torchrun:
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout))
    else:
        alone(backend)
    return world.around(env, device)


def alone(backend: str | None = None) -> None:
    """A process group of one, which needs neither addresses nor ports; for tensors on any device."""
    backend = backend or ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def should_stop() -> bool:
    """Return whether any rank was asked to stop, by the run's stop file, SIGTERM, SIGUSR1 or SIGUSR2.

    The answer is the same on every rank, and every rank must call it at the same point, once per step. If it is true,
    save a checkpoint and exit. Once true, it stays true.

    >>> from slurmddp.runtime import distributed, should_stop
    >>> import os, signal
    >>> with distributed():
    ...     for step in range(1, 100):
    ...         if step == 3:
    ...             os.kill(os.getpid(), signal.SIGUSR1)
    ...         if should_stop():
    ...             print("save here, at step", step)
    ...             break  # doctest: +ELLIPSIS
    stopping   SIGUSR1 received by rank 0 on ...
    save here, at step 3

    It costs an all-reduce of one number over gloo on the host: some tenths of a millisecond. No GPU waits for it, but
    the hosts of the ranks wait for each other. (Checkpointer.after asks, too, in the all-reduce that it needs anyway.)
    One rank per node checks for the stop file, $SLURMDDP_STOP_FILE, at most once a second.

    Without `distributed`, signals count from the first call of any function of this library, except those that the
    script handles itself. Then the process group must exist already, unless the process is alone.
    """
    now = get()
    if now.stopped is not None:
        return True
    now.enter("step", now.step)
    return now.agree_to_stop()[0]
