"""TCP stores that listen on one address. torch's own listen on all interfaces, whatever host name they are given."""

import datetime
import errno
import socket
import time
from functools import partial
from typing import NamedTuple

from torch.distributed import TCPStore

from slurmddp.records.address import is_loopback
from slurmddp.runtime.agent.tunnel import LOOPBACK, Tunnel, listen
from slurmddp.runtime.errors import UserError

_ANY = "0.0.0.0"
_PATIENCE = 5.0  # seconds in which a port that is in use may become free: a job that ends may still hold it


def resolve(host: str, port: int) -> str:
    """Return an address of a host, IPv4 where it has one. Raises UserError."""
    try:
        found = [(item[0], str(item[4][0])) for item in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except OSError as error:
        raise UserError(f"cannot resolve the name of the head node, {host}: {error.strerror}") from error
    return next((address for family, address in found if family == socket.AF_INET), found[0][1])


def own_address(peer: str, port: int) -> str:
    """Return this node's address of the interface that leads to `peer`. Sends nothing. Raises UserError."""
    try:
        with socket.socket(_family(peer), socket.SOCK_DGRAM) as probe:
            probe.connect((peer, port or 9))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UserError(f"has no route to {peer}: {error.strerror}") from error


class Served(NamedTuple):
    """A store of this process. port: where the other nodes reach it; tunnel: with TLS, for the caller to close."""

    store: TCPStore
    port: int
    tunnel: Tunnel | None = None


def serve(address: str, port: int, timeout: datetime.timedelta, *, several_nodes: bool, pair: str = "") -> Served:
    """Return a store that listens on `address` only; port 0: any free one. With the run's key pair, through TLS.

    Where the other nodes cannot reach `address` (a head whose own name leads to the loopback interface, or to an
    address of a router), it listens on all interfaces. Raises UserError where the port is in use.
    """
    if several_nodes and is_loopback(address):
        print(f"slurmddp: note: the name of this node resolves to {address}, so the store listens on all interfaces")
        address = _ANY
    listener = _listen(address, port)
    if listener is None and several_nodes:
        print(f"slurmddp: note: {address} is not an address of this node, so the store listens on all interfaces")
        listener = _listen(address := _ANY, port)
    if listener is None:
        raise UserError(f"cannot listen on {address}: it is not an address of this node")
    port = int(listener.getsockname()[1])
    if not (several_nodes and pair):
        return Served(_store(LOOPBACK if address == _ANY else address, port, listener, timeout), port)
    try:
        inside = listen(LOOPBACK, 0)
        tunnel = Tunnel().host(listener, inside, pair)
    except OSError as error:
        raise UserError(f"cannot encrypt the store: {error}. Set network.store_tls to false") from error
    return Served(_store(*tunnel.local, inside, timeout), port, tunnel)


def _store(host: str, port: int, listener: socket.socket, timeout: datetime.timedelta) -> TCPStore:
    """Return a store that accepts from the listener, and its client, which connects with `host`."""
    make = partial(TCPStore, host, port, is_master=True, wait_for_workers=False, timeout=timeout)
    listening = listener.detach()  # From here on it is the store's, which closes it.
    try:
        return make(master_listen_fd=listening)
    except RuntimeError as error:
        if "libuv" not in str(error):
            raise
        return make(master_listen_fd=listening, use_libuv=False)  # torch 2.4: only the older kind takes a socket


def connect(address: str, port: int, timeout: datetime.timedelta, pair: str = "") -> TCPStore:
    """Return a client of the head's store. With the run's key pair: through TLS, as long as this process lives."""
    if pair:
        address, port = Tunnel().forward(address, port, pair, timeout.total_seconds()).local
    return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)


def _listen(address: str, port: int) -> socket.socket | None:
    """None if it is not this node's address."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            return listen(address, port)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return None
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise UserError(f"cannot listen on port {port} of {address}: {error.strerror}") from error
        time.sleep(0.2)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
