"""torchrun's rendezvous handlers, with signed messages and a store of their own for the ranks of each start."""

import datetime
import json
import os
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from slurmddp.records import next_save
from slurmddp.records.address import is_loopback
from slurmddp.records.rank_events import RanksStopped, StoreOpen
from slurmddp.runtime import torch_private
from slurmddp.runtime.agent import stores
from slurmddp.runtime.agent.signed import SignedBackend, SignedStore
from slurmddp.runtime.agent.tunnel import LOOPBACK, Tunnel
from slurmddp.runtime.environment import CHECKPOINT, RESUME, START, STORE, earlier_checkpoints
from slurmddp.runtime.errors import UserError
from slurmddp.runtime.journal import Events, read_events
from slurmddp.runtime.signing import Key
from slurmddp.shared.run_folder import RunFolder

C10D, STATIC = "slurmddp-c10d", "slurmddp-static"
_RANKS_STORE = "slurmddp/ranks_store"
_RANKS_TIMEOUT = datetime.timedelta(minutes=5)


class StopRequested(Exception):
    """The run was asked to stop, so ranks that failed are not started again."""


def register(key: Key, events: Events, folder: RunFolder, environ: Mapping[str, str]) -> None:
    """Make the backends known to torchrun: --rdzv-backend=slurmddp-c10d and slurmddp-static."""
    saves = read_saves(environ, folder, events)

    def handler(name: str, make: Callable[..., RendezvousHandler], parameters: RendezvousParameters) -> "Handler":
        if key.why and parameters.max_nodes > 1:
            events.write(StoreOpen(key.why))
        return Handler(name, make(parameters, key), parameters, events, folder.stop, saves, key.pair)

    for name, make in ((C10D, _c10d), (STATIC, _static)):
        rendezvous_handler_registry.register(name, partial(handler, name, make))


@dataclass(frozen=True)
class Saves:
    """What the ranks of a script of the user's own may load: the agent of the first node chooses it before they start.

    watch: where the script saves, besides the run's checkpoints/. earlier: checkpoints/ of runs before this one.
    """

    folder: RunFolder
    events: Events
    watch: Sequence[str]
    earlier: Sequence[str]

    def before_start(self) -> str:
        """Return the newest whole save of the run, after it was kept if need be; empty without one."""
        places = next_save.Places(str(self.folder.path), self.watch, self.earlier)
        return next_save.before_start(places, read_events(self.folder.events, *next_save.KINDS), self.events.write)


def read_saves(environ: Mapping[str, str], folder: RunFolder, events: Events) -> Saves | None:
    """Return what the job says of the saves of its script; None for a bundled task."""
    if RESUME not in environ:
        return None
    return Saves(folder, events, json.loads(environ[RESUME])["watch"], [*map(str, earlier_checkpoints(environ))])


class Handler(RendezvousHandler):
    """Opens a store for the ranks after each rendezvous, and gives everything else to a handler of torch's own."""

    def __init__(
        self,
        name: str,
        inner: RendezvousHandler,
        parameters: RendezvousParameters,
        events: Events,
        stop: Path,
        saves: Saves | None,
        pair: str,
    ) -> None:
        """`inner`: its `next_rendezvous` returns a SignedStore. stop: the file that asks the ranks to stop.

        pair: the run's key pair for TLS, if there is one.
        """
        self._stop, self._saves, self._pair = stop, saves, pair
        self._name, self._inner, self._parameters, self._events = name, inner, parameters, events
        self._met = False
        self._ranks_store: TCPStore | None = None
        self._tunnel: Tunnel | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def get_backend(self) -> str:
        return self._name

    @property
    def use_agent_store(self) -> bool:
        """The ranks are all clients of a store that is here."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Raises RendezvousStateError and ForgedError for messages of others, and StopRequested."""
        if self._met and self._stop.exists():
            raise StopRequested("the run was asked to stop: its ranks do not start again")
        if self._met:
            # The agent has stopped its ranks to start them again. job.sh ends the attempt if they do not start.
            self._events.write(RanksStopped())
        self._met = True
        self._ranks_store = None  # the ranks of the start before are gone
        if self._tunnel:
            self._tunnel.close()
            self._tunnel = None
        found = self._inner.next_rendezvous()
        store: Any = found.store
        if found.rank == 0:
            name, several = self._own_name(), self._parameters.max_nodes > 1
            address = stores.resolve(name, 0)
            served = stores.serve(address, 0, _RANKS_TIMEOUT, several_nodes=several, pair=self._pair)
            self._ranks_store, self._tunnel = served.store, served.tunnel
            if self._tunnel and self._tunnel.is_open:
                self._events.write(StoreOpen("users of this node reach it: its kernel refuses a filter on the port"))
            checkpoint = self._saves.before_start() if self._saves else ""
            store.set(_RANKS_STORE, json.dumps([name, served.port, checkpoint]))
        name, port, os.environ[CHECKPOINT] = json.loads(store.get(_RANKS_STORE))
        os.environ[START] = store.start
        if self._parameters.max_nodes == 1:
            os.environ[STORE] = self._folder_of_start()
        elif self._pair:
            if self._tunnel is None:
                limit = _RANKS_TIMEOUT.total_seconds()
                self._tunnel = Tunnel().forward(stores.resolve(name, port), port, self._pair, limit)
            os.environ[STORE] = "{}:{}".format(*self._tunnel.local)
        return RendezvousInfo(store, found.rank, found.world_size, RendezvousStoreInfo(name, port))

    def _folder_of_start(self) -> str:
        """Return a new folder for the store of this start's ranks, in one of this user that goes with the agent."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="slurmddp-store-", ignore_cleanup_errors=True)
        return tempfile.mkdtemp(prefix="start-", dir=self._folder.name)

    def _own_name(self) -> str:
        """MASTER_ADDR, where this node is the first one: the address, or else the name, by which ranks reach it."""
        if self._parameters.max_nodes == 1:
            return LOOPBACK
        if self._parameters.local_addr:
            return self._parameters.local_addr
        host, port = _endpoint(self._parameters)
        own = stores.own_address(stores.resolve(host, port), port)
        return socket.getfqdn() if is_loopback(own) else own

    def is_closed(self) -> bool:
        return self._inner.is_closed()

    def set_closed(self) -> None:
        self._inner.set_closed()  # type: ignore[no-untyped-call]

    def num_nodes_waiting(self) -> int:
        return self._inner.num_nodes_waiting()

    def get_run_id(self) -> str:
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        return self._inner.shutdown()


class _Static(StaticTCPRendezvous):
    """torch's, on a store that is there already."""

    def __init__(self, parameters: RendezvousParameters, store: SignedStore) -> None:
        host, port = _endpoint(parameters)
        super().__init__(host, port, _rank(parameters), parameters.max_nodes, parameters.run_id, timeout=1)
        self._signed = store

    def next_rendezvous(self) -> RendezvousInfo:
        found: Any = self._signed
        return RendezvousInfo(
            found, self.rank, self.world_size, RendezvousStoreInfo(self.master_addr, self.master_port)
        )


def _static(parameters: RendezvousParameters, key: Key) -> RendezvousHandler:
    timeout = datetime.timedelta(seconds=parameters.get_as_int("timeout", 600) or 600)
    store = PrefixStore(parameters.run_id, _agents_store(parameters, timeout, key.pair, is_host=_rank(parameters) == 0))
    return _Static(parameters, SignedStore(store, key, _where(parameters), start=0))


def _c10d(parameters: RendezvousParameters, key: Key) -> RendezvousHandler:
    timeout = datetime.timedelta(seconds=parameters.get_as_int("read_timeout", 60) or 60)
    is_host = parameters.get_as_bool("is_host", parameters.max_nodes == 1 or None)
    if is_host is None:
        raise UserError("--rdzv-conf has no is_host: give 1 on the head node and 0 on the others")
    store, where = _agents_store(parameters, timeout, key.pair, is_host=is_host), _where(parameters)
    backend = SignedBackend(C10D, C10dRendezvousBackend(store, parameters.run_id), key, where)
    inner: Any = create_handler(store, backend, parameters)
    torch_private.replace_store(inner, lambda store, start: SignedStore(store, key, where, start=start))
    return inner  # type: ignore[no-any-return]


def _agents_store(parameters: RendezvousParameters, timeout: datetime.timedelta, pair: str, *, is_host: bool) -> Store:
    """Return the store in which the agents meet. Raises UserError if its port is in use."""
    if parameters.max_nodes == 1:
        # One agent has nobody to meet: a store inside of this process, which no other user can reach.
        alone = HashStore()
        alone.set_timeout(timeout)
        return alone
    host, port = _endpoint(parameters)
    address = stores.resolve(host, port)
    if is_host:
        return stores.serve(address, port, timeout, several_nodes=True, pair=pair).store
    return stores.connect(address, port, timeout, pair)


def _endpoint(parameters: RendezvousParameters) -> tuple[str, int]:
    return parse_rendezvous_endpoint(parameters.endpoint, default_port=0)


def _rank(parameters: RendezvousParameters) -> int:
    rank = parameters.get_as_int("rank")
    if rank is None:
        raise UserError("--rdzv-conf has no rank: give 0 on the head node, 1 on the next, and so on")
    return rank


def _where(parameters: RendezvousParameters) -> tuple[str, str]:
    return parameters.run_id, os.environ.get("SLURMDDP_ATTEMPT", "0")
