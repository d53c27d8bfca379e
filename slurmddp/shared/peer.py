"""Whose program is at the other end of a TCP connection within this machine. Linux. Standard library only.

A connection has two rows in /proc/net/tcp or tcp6, one per end. What Linux 6.18 shows in the row of a listener's end:

    not accepted yet         ESTABLISHED, inode 0, uid of the listener
    accepted                 ESTABLISHED, inode and uid of the program
    closed by the listener   FIN_WAIT2, then TIME_WAIT, inode 0, uid 0: somebody may have sent before that

So only a row with an inode names its owner. A connection that waits to be accepted belongs to the listening socket,
whose row always has an inode. If the listener closes, the kernel resets what waits, so no other listener inherits it.
"""

import os
import pwd
import socket
import struct
import time
from collections.abc import Iterator
from ipaddress import IPv6Address, ip_address
from typing import NamedTuple

_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_ESTABLISHED, _SYN_RECEIVED, _LISTEN = "01", "03", "0A"
#: Reads of the tables before a row counts as absent: the kernel can leave one out while others come and go.
_READS = 3

#: An address, IPv4 in its IPv6 form, and a port.
_Address = tuple[IPv6Address, int]


class _Row(NamedTuple):
    local: _Address
    remote: _Address
    state: str
    uid: int
    inode: int


def distrust(connection: socket.socket) -> str | None:
    """Return why the program at the other end may not be this user's, for a message; None if it is this user's."""
    try:
        uid = _owner(connection)
        known = _is_mapped(os.getuid())
    except OSError as error:
        return f"it is unknown whose it is: {error}"
    if uid is None or not known:
        return "the kernel does not show whose it is (it may be closed already)"
    return None if uid == os.getuid() else f"it belongs to another user, {_name(uid)}"


def _owner(connection: socket.socket) -> int | None:
    """Return the uid of the other end; None if the kernel does not show it. Raises OSError."""
    ours, theirs = _address(*connection.getsockname()[:2]), _address(*connection.getpeername()[:2])
    for read in range(_READS):
        time.sleep(0.05 * read)
        rows = list(_rows(theirs[1]))
        if row := next((row for row in rows if (row.local, row.remote) == (theirs, ours)), None):
            break
    else:
        return None
    if row.inode:
        return row.uid
    return _listener(rows, *theirs) if row.state in (_ESTABLISHED, _SYN_RECEIVED) else None


def _listener(rows: list[_Row], host: IPv6Address, port: int) -> int | None:
    """Return the uid of the socket that listens there: on the address itself, else on all addresses."""
    everywhere = ["0.0.0.0", "::"] if host.ipv4_mapped else ["::"]
    for address in ((host, port), *(_address(each, port) for each in everywhere)):
        uids = {row.uid for row in rows if row.state == _LISTEN and row.local == address and row.inode}
        if uids:
            return uids.pop() if len(uids) == 1 else None
    return None


def _rows(port: int) -> Iterator[_Row]:
    """Yield the rows of sockets that have this local port."""
    for table in _TABLES:
        if table.endswith("6") and not os.path.exists(table):
            return  # IPv6 is switched off
        with open(table, encoding="ascii") as lines:
            next(lines, None)
            for line in lines:
                _, local, remote, state, _, _, _, uid, _, inode, *_ = line.split()
                if local.endswith(f":{port:04X}"):
                    yield _Row(_decoded(local), _decoded(remote), state, int(uid), int(inode))


def _decoded(text: str) -> _Address:
    """Return an address as the kernel writes it: words of 32 bits in the order of this machine."""
    host, _, port = text.partition(":")
    words = struct.pack(f"={len(host) // 8}I", *(int(host[at : at + 8], 16) for at in range(0, len(host), 8)))
    return _address(socket.inet_ntop(socket.AF_INET if len(words) == 4 else socket.AF_INET6, words), int(port, 16))


def _address(host: str, port: int) -> _Address:
    address = ip_address(host.partition("%")[0])  # without a link-local address's interface
    return (IPv6Address(f"::ffff:{address}") if address.version == 4 else address), port


def _is_mapped(uid: int) -> bool:
    """Return whether this user namespace has the uid: the kernel shows all others under one number, 65534."""
    with open("/proc/self/uid_map", encoding="ascii") as lines:
        ranges = [[int(word) for word in line.split()] for line in lines]
    return any(first <= uid < first + count for first, _, count in ranges)


def _name(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"
