"""TCP stores that listen on one address. torch's own listen on all interfaces, whatever host name they are given."""

import datetime
import errno
import socket
import time
from functools import partial

from torch.distributed import TCPStore

from slurmddp.records.address import is_loopback
from slurmddp.runtime.errors import UserError

LOOPBACK = "127.0.0.1"
_ANY = "0.0.0.0"
_BACKLOG = 4096  # a connection for each rank, at once
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


def serve(address: str, port: int, timeout: datetime.timedelta, *, several_nodes: bool) -> TCPStore:
    """Return a store that listens on `address` only; port 0: any free one.

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
    # From here on it is the store's, which closes it.
    make = partial(
        TCPStore,
        LOOPBACK if address == _ANY else address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.detach(),
    )
    try:
        return make()
    except RuntimeError as error:
        if "libuv" not in str(error):
            raise
        return make(use_libuv=False)  # torch 2.4: only the older kind of store takes a socket


def connect(address: str, port: int, timeout: datetime.timedelta) -> TCPStore:
    return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)


def _listen(address: str, port: int) -> socket.socket | None:
    """None if it is not this node's address."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            return _listener(address, port)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return None
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise UserError(f"cannot listen on port {port} of {address}: {error.strerror}") from error
        time.sleep(0.2)


def _listener(address: str, port: int) -> socket.socket:
    listener = socket.socket(_family(address), socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
