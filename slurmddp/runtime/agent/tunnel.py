"""Mutual TLS between the nodes of a run, for torch's store, which knows neither encryption nor passwords.

    rank or agent -> loopback port of this node's agent -> TLS -> head's agent -> gate -> store

Both ends of TLS show the run's certificate and accept no other one. A loopback port serves programs of this user
only, and where the kernel can, it lets only this process connect with the store itself. Everything runs in one thread
of the agent, so that all connections close with it.
"""

import array
import asyncio
import functools
import resource
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Coroutine
from typing import Any

from slurmddp.shared.peer import distrust

LOOPBACK = "127.0.0.1"
#: Where this user's programs on the head reach the store, at the port that the store has on LOOPBACK.
_FRONT = "127.0.0.2"
_FILES = 1 << 16
_BACKLOG = 4096  # a connection for each rank, at once
_HANDSHAKE, _CONNECT = 60.0, 10.0  # seconds
_RETRY = 0.2  # seconds until the next look for a head that does not listen yet
_SO_ATTACH_FILTER = 26
#: X509_V_FLAG_NO_CHECK_TIME: the pair is of this run, and a node's clock may be behind the login node's.
_NO_CHECK_TIME = 0x200000


def context(pair: str, *, server: bool) -> ssl.SSLContext:
    """Return TLS 1.3 in which each end shows the certificate in the file `pair`, and accepts this one only."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname = False
    made.verify_mode = ssl.CERT_REQUIRED
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.verify_flags |= _NO_CHECK_TIME
    made.load_cert_chain(pair)
    made.load_verify_locations(pair)
    return made


class Gate:
    """A store's listener, to which the kernel lets connections of this object only. is_open: it refuses to do so."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener, self.is_open = listener.dup(), False
        try:
            self._let(0)
        except PermissionError:  # for ordinary users; seen with Linux 6.18 of a cloud
            self.is_open = True

    def connect(self) -> socket.socket:
        """Raises OSError."""
        connection = socket.socket()
        try:
            connection.settimeout(_CONNECT)
            connection.bind((LOOPBACK, 0))  # from here on, nobody else has this port
            self._let(connection.getsockname()[1])
            connection.connect(self._listener.getsockname())
            connection.setblocking(False)
        except OSError:
            connection.close()
            raise
        finally:
            self._let(0)
        return connection

    def close(self) -> None:
        self._listener.close()

    def _let(self, port: int) -> None:
        """Drop each SYN that is not from this port: linux/filter.h, on the TCP header."""
        if self.is_open:
            return
        flags = ((0x30, 0, 0, 13), (0x54, 0, 0, 0x12), (0x15, 0, 3, 0x02))  # no SYN, or SYN and ACK: keep
        source = ((0x28, 0, 0, 0), (0x15, 1, 0, port))
        program = (*flags, *source, (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFFFFFF))  # the others: drop; keep
        code = array.array("B", b"".join(struct.pack("HBBI", *line) for line in program))
        value = struct.pack("HP", len(program), code.buffer_info()[0])
        self._listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, value)


class Tunnel:
    """Accepts connections, until `close`, and connects each one with the store or with the head.

    local: where this node's programs reach the store. is_open: other users of the head reach it past this.
    """

    local: tuple[str, int]
    is_open = False

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._ends: set[_End] = set()
        self._closed: list[Any] = []
        self._noted = False

    def host(self, outside: socket.socket, inside: socket.socket, pair: str) -> "Tunnel":
        """Lead from TLS on the listener `outside`, and from this node, to a store that will accept from `inside`.

        Returns itself. Raises OSError.
        """
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < (most := min(hard, _FILES)):  # three for each connection; often the soft limit is 1024
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        gate = Gate(inside)
        self.is_open = gate.is_open
        front = listen(_FRONT, inside.getsockname()[1])
        server, onward = context(pair, server=True), functools.partial(self._to_store, gate)
        self._closed += [gate, outside, front]
        self._start(self._accept(outside, server, onward))
        self._start(self._accept(front, None, onward))
        self.local = _FRONT, front.getsockname()[1]
        return self

    def forward(self, address: str, port: int, pair: str, seconds: float) -> "Tunnel":
        """Lead from this node to the head, which may begin to listen within some seconds. Returns itself."""
        listener = listen(LOOPBACK, 0)
        onward = functools.partial(self._to_head, address, port, context(pair, server=False), seconds)
        self._closed.append(listener)
        self._start(self._accept(listener, None, onward))
        self.local = LOOPBACK, listener.getsockname()[1]
        return self

    def close(self) -> None:
        """Close all listeners and connections, soon."""
        _loop().call_soon_threadsafe(self._close)

    def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for end in self._ends:
            end.transport.abort()
        for each in self._closed:
            each.close()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        _loop().call_soon_threadsafe(self._task, work)

    def _task(self, work: Coroutine[Any, Any, None]) -> None:
        task = _loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket, tls: ssl.SSLContext | None, onward: Any) -> None:
        listener.setblocking(False)
        while True:
            try:
                connection, _ = await _loop().sock_accept(listener)
            except OSError as error:  # such as too many open files
                self._note(f"cannot accept a connection: {error}")
                await asyncio.sleep(_RETRY)
                continue
            self._task(self._join(connection, tls, onward))

    async def _join(self, connection: socket.socket, tls: ssl.SSLContext | None, onward: Any) -> None:
        try:
            ours = await self._accepted(connection, tls)
        except OSError as error:
            connection.close()
            self._note(f"refused a connection of somebody else: {error}")
            return
        try:
            _, theirs = await onward()
        except OSError as error:
            ours.transport.abort()
            self._note(f"cannot connect to the store: {error}")
            return
        theirs.join(ours)
        ours.join(theirs)

    async def _accepted(self, connection: socket.socket, tls: ssl.SSLContext | None) -> "_End":
        """Raises OSError for a stranger's connection."""
        if tls is None and (reason := distrust(connection)):
            raise PermissionError(reason)
        limit: dict[str, Any] = {"ssl": tls, "ssl_handshake_timeout": _HANDSHAKE} if tls else {}
        return (await _loop().connect_accepted_socket(self._end, connection, **limit))[1]

    def _end(self) -> "_End":
        return _End(self._ends)

    async def _to_store(self, gate: Gate) -> Any:
        return await _loop().create_connection(self._end, sock=gate.connect())

    async def _to_head(self, address: str, port: int, tls: ssl.SSLContext, seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        while True:
            try:
                return await _loop().create_connection(self._end, address, port, ssl=tls, server_hostname="")
            except ssl.SSLError:
                raise
            except OSError:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(_RETRY)

    def _note(self, text: str) -> None:
        """Print it once, or a stranger could fill the log."""
        if not self._noted:
            self._noted = True
            print(f"slurmddp: note: the store of the run: {text}", file=sys.stderr, flush=True)


class _End(asyncio.Protocol):
    """One of the two connections of a pipe."""

    transport: asyncio.Transport

    def __init__(self, open_: "set[_End]") -> None:
        self._open = open_
        self._other: asyncio.Transport | None = None
        self._early: list[bytes] = []

    def join(self, other: "_End") -> None:
        self._other = other.transport
        other.transport.writelines(self._early)
        if self.transport.is_closing():
            self._other.close()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self._open.add(self)

    def data_received(self, data: bytes) -> None:
        if self._other is None:
            self._early.append(data)
        else:
            self._other.write(data)

    def pause_writing(self) -> None:
        if self._other is not None:
            self._other.pause_reading()

    def resume_writing(self) -> None:
        if self._other is not None:
            self._other.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._open.discard(self)
        if self._other is not None:
            self._other.close()


def listen(address: str, port: int) -> socket.socket:
    """Raises OSError."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    made = asyncio.new_event_loop()
    threading.Thread(target=made.run_forever, name="slurmddp-tunnel", daemon=True).start()
    return made
