"""Which host's links are slow: the hosts exchange a little data in pairs, each host with two others."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from slurmddp.runtime.measure.pairs import Pair, isolate, rounds
from slurmddp.runtime.world import World

SIZE = 256 * 1024
_REPEATS = 5
_SLOW = 3.0
_FLOOR = 0.001

Exchange = Callable[[dist.ProcessGroup, int], float]


@dataclass(frozen=True)
class LinkReport:
    """What the pairs told. seconds: of an exchange, by pair of hosts.

    host: the one whose links are all slow; None where that is no single host. factor: the exchanges of `host` (without
    one: the slowest exchange) over those of the others.
    """

    seconds: Mapping[Pair, float]
    host: str | None
    factor: float

    def text(self) -> str:
        if self.host is not None:
            return f"the links of {self.host} are {self.factor:.1f} times as slow as those between the others"
        if not self.seconds:
            return "a single host: no links to compare"
        worst = max(self.seconds, key=self.seconds.__getitem__)
        between = " and ".join(worst)
        if len(self.seconds) == 1:
            return f"{SIZE // 1024} KiB both ways between {between} take {self.seconds[worst] * 1000:.1f} ms"
        if self.factor >= _SLOW:
            return f"the link between {between} is {self.factor:.1f} times as slow as the others"
        return "all links between neighbouring hosts are about equally fast"


def probe_links(world: World, exchange: Exchange | None = None) -> LinkReport:
    """Time the links between the hosts: a collective, some milliseconds if all is well. The same result on every rank.

    The first rank of each host exchanges 256 KiB with that of two others, over the coordination group. `exchange` (for
    tests): does one with a rank of that group, and returns its seconds.
    """
    nodes = world.gather(world.node)
    leaders = {name: nodes.index(name) for name in dict.fromkeys(nodes)}
    measured: list[tuple[str, str, float]] = []
    for pair in (pair for pairs in rounds(list(leaders)) for pair in pairs):
        first, second = (leaders[name] for name in pair)
        if world.rank in (first, second):
            seconds = (exchange or _exchange)(world.coordination, second if world.rank == first else first)
            if world.rank == first:
                measured.append((*pair, seconds))
    return judge({(first, second): seconds for part in world.gather(measured) for first, second, seconds in part})


def judge(seconds: Mapping[Pair, float]) -> LinkReport:
    """Return what the times of the pairs say. A link is slow that takes three times, and a millisecond, more than
    usual.

    At most one host is thought to be ill in a small ring: two of its links may be slow, so usual is the median of the
    others.
    """
    if len(seconds) < 2:
        return LinkReport(seconds, None, 1.0)
    ordered = sorted(seconds.values(), reverse=True)
    usual = max(statistics.median(ordered[min(2, len(ordered) - 1) :]), 1e-9)
    limit = max(_SLOW * usual, usual + _FLOOR)
    hosts, _ = isolate(seconds, [pair for pair, taken in seconds.items() if taken > limit])
    if hosts:
        best = {host: min(taken for pair, taken in seconds.items() if host in pair) for host in hosts}
        host = max(hosts, key=best.__getitem__)
        return LinkReport(seconds, host, best[host] / usual)
    return LinkReport(seconds, None, ordered[0] / usual if ordered[0] > limit else 1.0)


def _exchange(group: dist.ProcessGroup, other: int) -> float:
    """Median seconds of sending SIZE bytes both ways at once: a throttled link lets the first pass at full speed."""
    content, buffer = torch.zeros(SIZE, dtype=torch.uint8), torch.empty(SIZE, dtype=torch.uint8)
    both_ways(content[:1], buffer[:1], group, other)  # both are here, and the connection stands
    times = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        both_ways(content, buffer, group, other)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def both_ways(content: torch.Tensor, buffer: torch.Tensor, group: dist.ProcessGroup, other: int) -> None:
    """Send `content` to a rank and receive `buffer` from it."""
    sent, received = dist.isend(content, other, group=group), dist.irecv(buffer, other, group=group)
    for work in (sent, received):
        if work is not None:
            work.wait()
