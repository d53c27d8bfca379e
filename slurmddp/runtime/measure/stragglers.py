"""Find hosts that slow the others down, at no cost to the steps: figures are gathered while training continues."""

import math
import statistics

import torch
import torch.distributed as dist

from slurmddp.runtime.measure import links, straggler_detection, timing
from slurmddp.runtime.measure.timing import StepTimer
from slurmddp.runtime.world import World

_FIRST_STEPS = 10
_FEWEST_STEPS, _MOST_STEPS = 5, 10_000


class Stragglers:
    """Compares the hosts' steps window by window. Made on every rank at the same place: it gathers once.

    A window is as many steps as take about a second, the same number on every rank. Its figures (40 bytes a rank)
    are gathered asynchronously over the coordination group and judged on rank 0 a window later.
    """

    def __init__(self, world: World, timer: StepTimer, *, samples: float = 1.0, seconds: float = 1.0) -> None:
        """`samples`: how many this rank has a step, relative to the mean of all ranks. `seconds`: of a window."""
        self._world = world
        self._reader = timer.reader()
        self._samples = samples
        self._seconds = seconds
        self._hosts = world.gather(world.node)
        self._length = self._left = _FIRST_STEPS
        self._gathering: tuple[torch.Tensor, dist.Work] | None = None
        self._settled = False
        self._persistence = straggler_detection.Persistence()
        self._network = straggler_detection.Network()
        #: On rank 0: whether it would like all ranks to call `probe`.
        self.wants_probe = False

    def step(self) -> list[straggler_detection.Notice]:
        """Call it on every rank after each `timer.end()`. Return the stragglers that begin or end, on rank 0 only."""
        self._left -= 1
        if self._left > 0:
            return []
        ranks = self._receive()
        self._send()
        self._left = self._length
        if not self._world.is_main or not ranks:
            return []
        return self._judge(ranks)

    def probe(self) -> tuple[links.LinkReport, list[straggler_detection.Notice]]:
        """Return time the links between hosts: a collective, for the step on which all ranks know of rank 0's wish."""
        report = links.probe_links(self._world)
        self.wants_probe = False
        if report.host is None or not self._world.is_main:
            return report, []
        rank = self._hosts.index(report.host)
        return report, self._persistence.begin(
            straggler_detection.Slow(report.host, rank, straggler_detection.NETWORK, report.factor, 0.0)
        )

    def close(self) -> None:
        """At a clean end, on every rank: wait for figures that are still on their way."""
        if self._gathering is not None:
            self._gathering[1].wait()
            self._gathering = None

    def _send(self) -> None:
        window = self._reader.window()
        if not self._settled:
            # The first steps are like no others: caches, connections, compilers.
            self._settled = True
            return
        figures = [
            window.mean(timing.DATA),
            window.mean(timing.FORWARD, timing.BACKWARD),
            window.mean(timing.NETWORK),
            window.mean(),
            self._samples,
        ]
        own = torch.tensor(figures, dtype=torch.float64)
        everyone = torch.empty(self._world.size, len(figures), dtype=torch.float64)
        work = dist.all_gather(list(everyone.unbind(0)), own, group=self._world.coordination, async_op=True)
        assert work is not None
        self._gathering = (everyone, work)

    def _receive(self) -> list[straggler_detection.Figures]:
        """The window before, which has long arrived. All ranks choose the length of later windows by it, alike."""
        if self._gathering is None:
            return []
        everyone, work = self._gathering
        work.wait()
        rows: list[list[float]] = everyone.tolist()
        steps = [row[3] for row in rows]
        if min(steps) <= 0:
            return []  # A device so far behind that not one step could be read.
        length = math.ceil(self._seconds / statistics.median(steps))
        self._length = min(max(length, _FEWEST_STEPS), _MOST_STEPS)
        return [
            straggler_detection.Figures(host, rank, *row)
            for rank, (host, row) in enumerate(zip(self._hosts, rows, strict=True))
        ]

    def _judge(self, ranks: list[straggler_detection.Figures]) -> list[straggler_detection.Notice]:
        found = straggler_detection.slow_hosts(ranks)
        links_are_slow = [slow for slow in self._persistence.active if slow.part == straggler_detection.NETWORK]
        if links_are_slow:
            # Known already: it lasts for as long as the wait does.
            if self._network.slow(ranks):
                found += links_are_slow
        elif self._network.add(ranks, found):
            self.wants_probe = True
        return self._persistence.add(found)
