"""Which host holds the others up, judged from what each rank's steps are made of. No torch, no clock: figures only.

Collectives make all ranks' steps equally long, so whole steps say nothing: a rank that is late waits least for the
network, and the others wait for it. A host is slow in a part where it takes clearly longer than the other hosts, and
where the others wait that much longer for the network than it does.
"""

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from slurmddp.records.rank_events import StragglerBegins, StragglerEnds

DATA, COMPUTE, NETWORK = "data", "compute", "network"

#: An excess counts from this share of the step on, ...
STEP_SHARE = 0.10
#: ... from this share of what the part takes on the other hosts, ...
PART_SHARE = 0.25
#: ... from so many standard deviations of the other hosts (estimated from their median absolute deviation), ...
DEVIATIONS = 5.0
#: ... from so many seconds a step, ...
SECONDS = 0.0005
#: ... and where the others wait at least this share of it longer for the network.
CONFIRMED = 0.5

#: The network is worth a look from this share of the step on while it is not known what is usual; ...
NETWORK_SHARE = 0.4
#: ... and then where it takes twice the usual, and more than usual by this share of all the rest of the step.
NETWORK_EXCESS = 0.25

#: Windows that are remembered, how many of them have to be slow, and how many clean ones in a row end it.
WINDOWS, NEEDED, CLEAN = 4, 3, 3


@dataclass(frozen=True)
class Figures:
    """One rank's window: seconds a step, by part. `samples`: how many it has a step, relative to the mean of all."""

    host: str
    rank: int
    data: float
    compute: float
    network: float
    step: float
    samples: float = 1.0


@dataclass(frozen=True)
class Slow:
    """A part that takes `factor` times as long on `host` as on the others, `seconds` a step more.

    `rank`: the slowest of the host. `single`: there is one host only, and its ranks were compared.
    """

    host: str
    rank: int
    part: str
    factor: float
    seconds: float
    single: bool = False


def slow_hosts(ranks: list[Figures]) -> list[Slow]:
    """Return the hosts that are slow in data or compute in one window; nothing for a single rank.

    Of each host the slowest rank counts, as it does for the run. On a single host, its ranks are compared."""
    if len({figures.host for figures in ranks}) > 1:
        groups = {figures.host: [other for other in ranks if other.host == figures.host] for figures in ranks}
    else:
        groups = {str(figures.rank): [figures] for figures in ranks}
    values: dict[str, Callable[[Figures], float]]
    values = {DATA: lambda figures: figures.data, COMPUTE: lambda figures: figures.compute}
    found = [_slow_by_both(groups, name, part, value) for part, value in values.items() for name in groups]
    return [slow for slow in found if slow is not None]


def _slow_by_both(
    groups: dict[str, list[Figures]], name: str, part: str, value: Callable[[Figures], float]
) -> Slow | None:
    """A rank with more samples takes longer, though not in proportion: so it has to be slow by the sample, too."""
    by_step = _slow(groups, name, part, value)
    by_sample = _slow(groups, name, part, lambda figures: value(figures) / max(figures.samples, 1e-9))
    if by_step is None or by_sample is None:
        return None
    return min(by_step, by_sample, key=lambda slow: slow.factor)


def _slow(groups: dict[str, list[Figures]], name: str, part: str, value: Callable[[Figures], float]) -> Slow | None:
    """Return whether one group is slow in a part, held against the median and the deviation of all others."""
    worst = max(groups[name], key=value)
    others = [max(map(value, group)) for other, group in groups.items() if other != name]
    if not others:
        return None
    usual = statistics.median(others)
    deviation = 1.4826 * statistics.median(abs(other - usual) for other in others)
    step = statistics.median(figures.step for group in groups.values() for figures in group)
    excess = value(worst) - usual
    if excess <= max(STEP_SHARE * step, PART_SHARE * usual, DEVIATIONS * deviation, SECONDS):
        return None
    waits = [figures.network for other, group in groups.items() if other != name for figures in group]
    if statistics.median(waits) - worst.network < CONFIRMED * excess:
        return None
    # Where the others need next to nothing, a hundredth of the step stands for it: factors of thousands say nothing.
    factor = value(worst) / max(usual, 0.01 * step)
    single = len({figures.host for group in groups.values() for figures in group}) == 1
    return Slow(worst.host, worst.rank, part, factor, excess, single)


@dataclass(frozen=True)
class Notice(Slow):
    """A straggler begins or ends. The figures are of the windows that led to it."""

    begins: bool = True

    def text(self) -> str:
        if not self.begins:
            return f"{self.host} is no longer slow in {self.part}"
        more = f"{self.seconds * 1000:.1f} ms more per step"
        if self.part == NETWORK:
            return f"{self.host} is slow in network: its links are {self.factor:.1f} times as slow as the others'"
        if self.single:
            who = f"rank {self.rank} on {self.host}"
            return f"{who} is slow in {self.part}: {self.factor:.1f} times the other ranks, {more}"
        return f"{self.host} is slow in {self.part}: {self.factor:.1f} times the others, {more} (rank {self.rank})"

    def event(self) -> StragglerBegins | StragglerEnds:
        made = StragglerBegins if self.begins else StragglerEnds
        return made(self.host, self.rank, self.part, round(self.factor, 2), round(self.seconds, 6))


class Persistence:
    """Tells what lasts from what passes: it begins with 3 slow windows of the last 4, and ends after 3 clean ones."""

    def __init__(self) -> None:
        self._windows: dict[tuple[str, str], deque[Slow | None]] = {}
        self._active: dict[tuple[str, str], Slow] = {}

    @property
    def active(self) -> list[Slow]:
        return list(self._active.values())

    def add(self, found: list[Slow]) -> list[Notice]:
        now = {(slow.host, slow.part): slow for slow in found}
        for key in now:
            self._windows.setdefault(key, deque(maxlen=WINDOWS))
        notices = []
        for key, history in list(self._windows.items()):
            history.append(now.get(key))
            hits = [slow for slow in history if slow is not None]
            if key not in self._active and len(hits) >= NEEDED:
                begun = self._active[key] = sorted(hits, key=lambda slow: slow.factor)[len(hits) // 2]
                notices.append(Notice(**vars(begun)))
            elif key in self._active and not any(list(history)[-CLEAN:]):
                notices.append(Notice(**vars(self._active.pop(key)), begins=False))
            if not hits and key not in self._active:
                del self._windows[key]
        return notices

    def begin(self, slow: Slow) -> list[Notice]:
        """Return a straggler found in another way; its windows are counted from now on."""
        key = (slow.host, slow.part)
        if key in self._active:
            return []
        self._active[key] = slow
        self._windows[key] = deque([slow], maxlen=WINDOWS)
        return [Notice(**vars(slow))]


class Network:
    """Decides when the links deserve a probe: where even the host that waits least waits far longer than usual, or for
    much of the step from the start, and no host is slow in anything else.
    """

    def __init__(self) -> None:
        self._usual: deque[float] = deque(maxlen=50)
        self._hits: deque[bool] = deque(maxlen=WINDOWS)
        self._windows_to_rest = 0
        self._rest = 8

    def slow(self, ranks: list[Figures]) -> bool:
        """Return whether the network is slow in this window: the wait of the last to arrive is the transport itself."""
        wait = min(figures.network for figures in ranks)
        step = statistics.median(figures.step for figures in ranks)
        if len(self._usual) < WINDOWS:
            result = wait > NETWORK_SHARE * step
        else:
            usual = statistics.median(self._usual)
            result = wait > max(2 * usual, usual + NETWORK_EXCESS * (step - wait))
        if not result:
            self._usual.append(wait)
        return result

    def add(self, ranks: list[Figures], found: list[Slow]) -> bool:
        """One more window: whether to probe."""
        self._hits.append(not found and self.slow(ranks))
        self._windows_to_rest -= 1
        if self._windows_to_rest > 0 or sum(self._hits) < NEEDED:
            return False
        # Not again soon: whoever looks rarely finds the same thing, and probes cost a little each.
        self._windows_to_rest, self._rest = self._rest, min(2 * self._rest, 512)
        self._hits.clear()
        return True
