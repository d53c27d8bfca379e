"""Which host's links are slow: the hosts exchange a little data in pairs, each host with two others."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from slurmddp.runtime.world import World

SIZE = 256 * 1024
_REPEATS = 5
_SLOW = 3.0
_FLOOR = 0.001

Exchange = Callable[[dist.ProcessGroup, int], float]


@dataclass(frozen=True)
class Pair:
    """Two hosts, and the seconds that an exchange between them took."""

    first: str
    second: str
    seconds: float


@dataclass(frozen=True)
class LinkReport:
    """Pairs, slowest first. `host`: the one whose links are all slow; None where that is no single host.

    `factor`: the exchanges of `host` (without one: the slowest exchange) over those of the others.
    """

    pairs: tuple[Pair, ...]
    host: str | None
    factor: float

    def text(self) -> str:
        if self.host is not None:
            return f"the links of {self.host} are {self.factor:.1f} times as slow as those between the others"
        if not self.pairs:
            return "a single host: no links to compare"
        worst = self.pairs[0]
        between = f"{worst.first} and {worst.second}"
        if len(self.pairs) == 1:
            return f"{SIZE // 1024} KiB both ways between {between} take {worst.seconds * 1000:.1f} ms"
        if self.factor >= _SLOW:
            return f"the link between {between} is {self.factor:.1f} times as slow as the others"
        return "all links between neighbouring hosts are about equally fast"


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Pairs of `count` hosts by round: neighbours on a ring, so that each host meets two others, one at a time.

    Two rounds however many hosts there are, three where their number is odd.
    """
    if count < 2:
        return []
    if count == 2:
        return [[(0, 1)]]
    ring = [(host, (host + 1) % count) for host in range(count)]
    even = count - count % 2
    result = [ring[0:even:2], ring[1:even:2]]
    return [*result, ring[even:]] if count % 2 else result


def probe_links(world: World, exchange: Exchange | None = None) -> LinkReport:
    """Time the links between the hosts: a collective, some milliseconds if all is well. The same result on every rank.

    The first rank of each host exchanges 256 KiB with that of two others, over the coordination group. `exchange` (for
    tests): does one with a rank of that group, and returns its seconds.
    """
    nodes = world.gather(world.node)
    names = list(dict.fromkeys(nodes))
    leaders = [nodes.index(name) for name in names]
    seen: list[Pair] = []
    for pairs in rounds(len(names)):
        for first, second in pairs:
            if world.rank in (leaders[first], leaders[second]):
                other = leaders[second] if world.rank == leaders[first] else leaders[first]
                seconds = (exchange or _exchange)(world.coordination, other)
                if world.rank == leaders[first]:
                    seen.append(Pair(names[first], names[second], seconds))
    own = [(pair.first, pair.second, pair.seconds) for pair in seen]
    return judge([Pair(*pair) for part in world.gather(own) for pair in part])


def judge(pairs: list[Pair]) -> LinkReport:
    """Return what the times of the pairs say. A link is slow that takes three times, and a millisecond, more than
    usual.

    At most one host is thought to be ill in a small ring: two of its links may be slow, so usual is the median of the
    others.
    """
    ordered = sorted(pairs, key=lambda pair: pair.seconds, reverse=True)
    if len(ordered) < 2:
        return LinkReport(tuple(ordered), None, 1.0)
    usual = max(statistics.median(pair.seconds for pair in ordered[min(2, len(ordered) - 1) :]), 1e-9)
    limit = max(_SLOW * usual, usual + _FLOOR)
    of_host: dict[str, list[float]] = {}
    for pair in ordered:
        for host in (pair.first, pair.second):
            of_host.setdefault(host, []).append(pair.seconds)
    slow = {host: min(times) for host, times in of_host.items() if len(times) > 1 and min(times) > limit}
    if slow:
        host = max(slow, key=lambda name: slow[name])
        return LinkReport(tuple(ordered), host, slow[host] / usual)
    worst = ordered[0].seconds
    return LinkReport(tuple(ordered), None, worst / usual if worst > limit else 1.0)


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
