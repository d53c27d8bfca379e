"""Hangs: what a rank does when it, or another one, is over its deadline."""

import contextlib
import os
import signal
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from slurmddp.records.rank_events import Hang as HangEvent
from slurmddp.runtime import torch_private
from slurmddp.runtime.environment import Environment, stat_fields
from slurmddp.runtime.journal import Events
from slurmddp.runtime.watch.blame import Beat, Verdict
from slurmddp.runtime.watch.heartbeat import Exchange, connect
from slurmddp.runtime.watch.process_exit import leave, leave_within, say, stacks
from slurmddp.runtime.watch.progress import Patience, Progress
from slurmddp.runtime.world import World
from slurmddp.shared.units import listed

#: Seconds without an exchange of heartbeats before their host counts as silent, and that are waited for the
#: stacks of all ranks.
_UNREACHABLE = 5.0
#: Seconds that saying all that may take, before a process ends without.
_LAST_RESORT = 15.0


class Hang:
    """Looks whether the main thread is late and what the others say, and ends the process on a verdict."""

    def __init__(self, world: World, progress: Progress, patience: Patience, events: Events, env: Environment) -> None:
        """Every rank has to make one; a failure on one is raised on all."""
        self._env, self._patience, self._progress, self._events = env, patience, progress, events
        self._nodes = world.gather((env.node, os.getpid()))
        #: Groups in which the main threads of all their ranks issue the same: their place among the others'.
        self.groups: list[Any] = [dist.group.WORLD, world.coordination]
        #: With the other ranks; already running.
        self.exchange = Exchange(connect(world), world, self._beat)
        self._rounds, self._silence = 0, 0.0
        world.gather(None)  # All first beats are in the store.
        self.exchange.start()

    def _beat(self, number: int) -> Beat:
        state, over = self._progress.state, self._patience.over
        issued = torch_private.collectives(self.groups)
        return Beat(number, self._env.node, state.step, state.phase, issued, late=over, over=over)

    def look(self, gone: float) -> None:
        """Called every now and then, `gone` seconds after the time before. Does not return on a verdict."""
        verdict = self.exchange.verdict
        if verdict is None:
            moved = self.exchange.rounds != self._rounds
            self._rounds, self._silence = self.exchange.rounds, 0.0 if moved else self._silence + gone
            if not self._patience.over or self._silence < _UNREACHABLE or self._env.rank == 0:
                return
            # The store is rank 0's: no answer is an answer, too. Nobody can be elected to say so; each
            # node's first rank does.
            state = self._progress.state
            verdict = Verdict("silent", [0], state.phase, state.step)
            here = (rank for rank, (name, _) in enumerate(self._nodes) if name == self._env.node and rank != 0)
            speaks = self._env.rank == min(here)
        else:
            speaks = self.exchange.judge == self._env.rank
        self._end(verdict, speaks)

    def _end(self, verdict: Verdict, speaks: bool) -> None:
        """Stacks of all ranks into the log, one message, one event, and everybody out."""
        leave_within(_LAST_RESORT, 1)
        name = f"rank {self._env.rank} on {self._env.node}"
        state, waited = self._progress.state, self._patience.waited
        say(f"{name}: in {state.phase} at step {state.step} for {waited:.1f} s; all threads:\n{stacks(name)}")
        # A rank that continues after a suspension sees the others silent: they have exited, and have reported why.
        if speaks and not self._events.told(HangEvent):
            deadline = self._patience.deadline()
            say(f"{name}: error: {self._message(verdict, waited, deadline)}\n")
            self._events.write(
                HangEvent(
                    kind=verdict.kind,
                    ranks=tuple(verdict.ranks),
                    nodes=tuple(self._nodes[rank][0] for rank in verdict.ranks),
                    phase=verdict.phase,
                    step=verdict.step,
                    waited=round(waited, 1),
                    deadline=round(deadline, 1),
                )
            )
        # The first process that ends takes the others with it: not before they have said where they are.
        self.exchange.dumped.set()
        self.exchange.all_dumped.wait(_UNREACHABLE)
        if verdict.kind == "silent":
            self._kill(verdict.ranks)
        leave(1)

    def _kill(self, ranks: Sequence[int]) -> None:
        """End this node's ranks that do not answer: a stopped one keeps torchrun waiting for half a minute."""
        for rank in ranks:
            node, pid = self._nodes[rank]
            with contextlib.suppress(OSError, ValueError, IndexError):
                # Our agent's child, or else somebody who has its number by now.
                if node == self._env.node and int(stat_fields(pid)[1]) == os.getppid():
                    os.kill(pid, signal.SIGKILL)

    def _message(self, verdict: Verdict, waited: float, deadline: float) -> str:
        where = f"{verdict.phase} at step {verdict.step}"
        late = f"no progress for {waited:.1f} s (the deadline is {deadline:.1f} s)"
        if not verdict.ranks:
            return f"hang in {where}: {late}, and no rank is behind the others: a collective does not complete"
        names = [f"rank {rank} on {self._nodes[rank][0]}" for rank in verdict.ranks]
        who = listed(names, 8)
        if verdict.kind == "silent":
            return f"hang: {who} did not arrive and sends no heartbeat (last seen in {where}): {late}"
        return f"hang: {who} did not arrive, still in {where}: {late}. Its stacks in the log show what it was doing"
