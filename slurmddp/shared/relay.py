"""Connections to a port of a node, all in one stream: `slurmddp debug port`. Standard library only.

On the node, `python -m slurmddp.shared.relay PORT` connects to the port for each connection that is accepted beside
the user; its standard input and output are the stream. The stream is made of frames: a kind, the connection's number,
the length of the data, the data. It connects only to a program of the same user.
"""

import contextlib
import os
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from queue import Queue
from typing import IO

from slurmddp.shared.peer import distrust

_HEADER = struct.Struct(">cII")
#: READY: the node's end runs. OPEN: a new connection. DATA: for it. END: no more data in this direction.
READY, OPEN, DATA, END = b"R", b"O", b"D", b"E"
_CHUNK = 1 << 16
#: Frames that wait for a slow connection before the others wait for it, too.
_WAITING = 256


class Stream:
    """One end of the stream, and the connections at this end."""

    def __init__(self, source: IO[bytes], sink: IO[bytes]) -> None:
        self._source, self._sink = source, sink
        self._sending = threading.Lock()
        self._queues: dict[int, Queue[bytes]] = {}

    def send(self, kind: bytes, number: int = 0, data: bytes = b"") -> None:
        """Send a frame. Raises OSError if the other end is gone."""
        with self._sending:
            self._sink.write(_HEADER.pack(kind, number, len(data)) + data)
            self._sink.flush()

    def frames(self) -> Iterator[tuple[bytes, int, bytes]]:
        """Yield the frames (kind, number, data) that are not for a known connection, until the stream ends."""
        while len(header := self._source.read(_HEADER.size)) == _HEADER.size:
            kind, number, length = _HEADER.unpack(header)
            data = self._source.read(length)
            if kind in (DATA, END) and number in self._queues:
                self._queues[number].put(data)
            elif kind in (READY, OPEN):
                yield kind, number, data

    def join(self, number: int, connection: socket.socket, *, new: bool = False) -> None:
        """Copy between a connection and its frames, in threads of its own, until both directions have ended.

        new: whether the other end has yet to hear of it. Raises OSError if that is gone.
        """
        connection.settimeout(None)
        queue = self._queues[number] = Queue(_WAITING)
        if new:
            self.send(OPEN, number)
        reads = threading.Thread(target=self._read, args=(number, connection), daemon=True)
        reads.start()
        threading.Thread(target=self._write, args=(number, connection, queue, reads), daemon=True).start()

    def _read(self, number: int, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # a connection that its program has reset, or the stream, has ended
            while data := connection.recv(_CHUNK):
                self.send(DATA, number, data)
        with contextlib.suppress(OSError):
            self.send(END, number)

    def _write(self, number: int, connection: socket.socket, queue: "Queue[bytes]", reads: threading.Thread) -> None:
        with contextlib.suppress(OSError):
            while data := queue.get():
                connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
        while data:  # nobody takes it any more: the frames of the others come behind it
            data = queue.get()
        reads.join()
        del self._queues[number]
        connection.close()


def connect(port: int) -> socket.socket:
    """Connect to this user's program on a port of this machine. Raises OSError if none listens there."""
    reasons = []
    for *kind, _, address in socket.getaddrinfo("localhost", port, type=socket.SOCK_STREAM):  # ::1 and 127.0.0.1
        connection = socket.socket(*kind)
        try:
            connection.settimeout(10)
            connection.connect(address)
            reason = distrust(connection)
        except OSError as error:
            reason = str(error)
        if reason is None:
            return connection
        connection.close()
        reasons.append(f"{address[0]}: {reason}")
    raise OSError("; ".join(reasons))


def main(port: int) -> None:
    """Connect to a port of this machine for each OPEN, until standard input ends."""
    stream = Stream(sys.stdin.buffer, sys.stdout.buffer)
    stream.send(READY)
    for _, number, _ in stream.frames():
        try:
            stream.join(number, connect(port))
        except OSError as error:
            print(
                f"slurmddp: {socket.gethostname()} has no program of yours on port {port}: {error}",
                file=sys.stderr,
                flush=True,
            )
            stream.send(END, number)


if __name__ == "__main__":
    main(int(sys.argv[1]))
    os._exit(0)  # threads may hold standard output, which an orderly end would wait for
