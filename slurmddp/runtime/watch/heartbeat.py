"""Heartbeats: every rank tells every other where it is, and together they find the one that did not arrive."""

import contextlib
import datetime
import json
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch.distributed import Store, TCPStore

from slurmddp.runtime import torch_private
from slurmddp.runtime.agent import stores
from slurmddp.runtime.world import World

_SECOND = 1.0
#: A rank is silent when so many readings, a second apart, show the same beat.
_SILENT = 4
#: Beats after which somebody else looks for the culprit, should whoever was about to have gone too.
_AGAIN = 20
_CONNECT = datetime.timedelta(seconds=30)


@dataclass(frozen=True)
class Beat:
    """Where a rank is. `arrived`: collectives issued so far; `over`: it is longer in its phase than it may."""

    number: int
    phase: str
    step: int
    arrived: int
    over: bool


@dataclass(frozen=True)
class Verdict:
    """Who holds up the others. `ranks`: none, where all have issued the same collectives and wait.

    `kind`: silent (no heartbeat), behind (heartbeats, but the others wait for it), all (none is behind).
    `phase`, `step`: where the culprit is, or was when it was last heard of. `by`: the rank that found out.
    """

    kind: str
    ranks: list[int]
    phase: str
    step: int
    by: int


def blame(beats: Sequence[Beat], silent: Sequence[int], by: int) -> Verdict | None:
    """Return who did not arrive, given every rank's last beat and the ranks that have fallen silent.

    None while it is too early to say: the rank that is behind may still be within its own deadline.
    """
    if silent:
        first = beats[silent[0]]
        return Verdict("silent", list(silent), first.phase, first.step, by)
    least = min((beat.step, beat.arrived) for beat in beats)
    behind = [rank for rank, beat in enumerate(beats) if (beat.step, beat.arrived) == least]
    if len(behind) == len(beats):
        # Waiting for data before the same collective as the others, which are on their way to it.
        behind = [rank for rank in behind if beats[rank].phase == "data"] or behind
    if not all(beats[rank].over for rank in behind):
        return None
    first = beats[behind[0]]
    if len(behind) == len(beats) > 1:
        return Verdict("all", [], first.phase, first.step, by)
    return Verdict("behind", behind, first.phase, first.step, by)


class Look:
    """One rank's look at the others' beats, a reading a second."""

    def __init__(self, by: int) -> None:
        self._by = by
        self._last: list[Beat] = []
        self._same: list[int] = []

    def read(self, beats: Sequence[Beat]) -> Verdict | None:
        """One more reading of all beats; a verdict once there is one."""
        if not self._last:
            self._last, self._same = list(beats), [1] * len(beats)
            return None
        for rank, (before, now) in enumerate(zip(self._last, beats, strict=True)):
            self._same[rank] = self._same[rank] + 1 if now.number == before.number else 1
        self._last = list(beats)
        if 1 < max(self._same) < _SILENT:
            return None  # Somebody may have fallen silent: one more reading.
        return blame(beats, [rank for rank, same in enumerate(self._same) if same >= _SILENT], self._by)


class Exchange(threading.Thread):
    """Exchanges beats through a store of its own, and works out the verdict when a rank is over its deadline.

    A thread of its own, since a store whose host has been stopped answers nothing, for ever: others look at
    `rounds`, which then stands still.
    """

    def __init__(self, store: Store, world: World, beat: Callable[[int], Beat]) -> None:
        """`beat`: this rank's, given its number. Every rank has to make one, and then call `start`."""
        super().__init__(name="slurmddp heartbeat", daemon=True)
        self._store = store
        self._rank, self._size = world.rank, world.size
        self._beat = beat
        self._over = 0
        self._look: Look | None = None
        #: Set it to beat no more.
        self.ended = threading.Event()
        #: Set it once this rank's stacks are in the log.
        self.dumped = threading.Event()
        #: Exchanges that were completed.
        self.rounds = 0
        #: Of the first rank that found out; the same on all ranks.
        self.verdict: Verdict | None = None
        #: All ranks that answer have written their stacks, or the store's host has gone.
        self.all_dumped = threading.Event()
        self._put()

    def run(self) -> None:
        """A beat a second until closed, or until the store's host is gone."""
        with contextlib.suppress(RuntimeError):  # torch's errors of a store are such.
            while not self.ended.wait(_SECOND):
                self._round()
                self.rounds += 1
                if self.verdict is not None:
                    self._wait_for_stacks(self.verdict)
                    return

    def _round(self) -> None:
        beat = self._put()
        if self._store.check(["verdict"]):
            self.verdict = Verdict(**json.loads(self._store.get("verdict")))
            return
        if not beat.over:
            self._over, self._look = 0, None
            return
        self._over += 1
        if self._over % _AGAIN == 1 and self._store.add(f"look/{beat.step}/{beat.phase}/{self._over}", 1) == 1:
            self._look = Look(self._rank)
        found = self._look.read(self._all()) if self._look is not None else None
        if found is not None:
            text = json.dumps(asdict(found))
            self.verdict = Verdict(**json.loads(self._store.compare_set("verdict", "", text)))

    def _put(self) -> Beat:
        beat = self._beat(self.rounds)
        self._store.set(f"beat/{self._rank}", json.dumps(asdict(beat)))
        return beat

    def _all(self) -> list[Beat]:
        keys = [f"beat/{rank}" for rank in range(self._size)]
        return [Beat(**json.loads(text)) for text in self._store.multi_get(keys)]

    def _wait_for_stacks(self, verdict: Verdict) -> None:
        self.dumped.wait()
        expected = self._size - (len(verdict.ranks) if verdict.kind == "silent" else 0)
        try:
            self._store.add("dumped", 1)
            while self._store.add("dumped", 0) < expected and not self.ended.wait(0.1):
                pass
        finally:
            self.all_dumped.set()


def connect(world: World) -> Store:
    """Return a store for heartbeats, hosted by rank 0 on a free port. Every rank has to call it, and all fail alike."""
    server: TCPStore | None = None

    def host() -> tuple[str, int]:
        nonlocal server
        name = os.environ.get("MASTER_ADDR", "localhost")  # By which all ranks have reached rank 0 already.
        several = int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1
        server = stores.serve(stores.resolve(name, 0), 0, _CONNECT, several_nodes=several)
        return name, server.port

    name, port = world.on_main(host)
    own = server
    return world.together(lambda: own or stores.connect(name, port, _CONNECT))


class Arrivals:
    """Counts the collectives that this rank has issued in `groups`, in which all its peers issue the same."""

    def __init__(self, groups: Iterable[Any]) -> None:
        self._groups = tuple(groups)

    def add(self, groups: Iterable[Any]) -> None:
        self._groups += tuple(group for group in groups if group not in self._groups)

    def count(self) -> int:
        """Their number so far; 0 if torch does not tell."""
        try:
            return sum(torch_private.collectives_of(group) for group in self._groups)
        except (AttributeError, RuntimeError):
            return 0
