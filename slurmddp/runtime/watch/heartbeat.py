"""Heartbeats: every rank tells every other where it is, and together they find the one that did not arrive."""

import contextlib
import datetime
import json
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict

from torch.distributed import PrefixStore, Store, TCPStore

from slurmddp.runtime.agent import stores
from slurmddp.runtime.environment import local_store
from slurmddp.runtime.watch.blame import Beat, Verdict, blame
from slurmddp.runtime.world import World

_SECOND = 1.0
#: A rank is silent when so many readings, a second apart, show the same beat.
_SILENT = 4
#: Beats after which somebody else looks for the culprit, should whoever was about to have gone too.
_AGAIN = 20
_CONNECT = datetime.timedelta(seconds=30)


class Look:
    """One rank's look at the others' beats, a reading a second."""

    def __init__(self) -> None:
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
        return blame(dict(enumerate(beats)), [rank for rank, same in enumerate(self._same) if same >= _SILENT])


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
        #: Of the first rank that found out, and that rank; the same on all ranks.
        self.verdict: Verdict | None = None
        self.judge = -1
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
            self._adopt(self._store.get("verdict"))
            return
        if not beat.over:
            self._over, self._look = 0, None
            return
        self._over += 1
        if self._over % _AGAIN == 1 and self._store.add(f"look/{beat.step}/{beat.phase}/{self._over}", 1) == 1:
            self._look = Look()
        verdict = self._look.read(self._all()) if self._look is not None else None
        if verdict is not None:
            text = json.dumps([self._rank, asdict(verdict)])
            self._adopt(self._store.compare_set("verdict", "", text))

    def _adopt(self, text: bytes) -> None:
        self.judge, fields = json.loads(text)
        self.verdict = Verdict(**fields)

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
    """Return a store for heartbeats. Every rank has to call it, and all fail alike.

    On several nodes with TLS it is a part of the ranks' store; else rank 0 hosts it on a free port.
    """
    server: TCPStore | None = None
    through = local_store()

    def host() -> tuple[str, int]:
        nonlocal server
        if through is not None:
            return secrets.token_hex(8), 0
        name = os.environ.get("MASTER_ADDR", "localhost")  # By which all ranks have reached rank 0 already.
        several = int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1
        server = stores.serve(stores.resolve(name, 0), 0, _CONNECT, several_nodes=several).store
        return name, server.port

    name, port = world.on_main(host)
    if through is not None:
        return world.together(lambda: PrefixStore(name, stores.connect(*through, _CONNECT)))
    own = server
    return world.together(lambda: own or stores.connect(name, port, _CONNECT))
