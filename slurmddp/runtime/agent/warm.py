"""What node.sh starts as the agent, where this node has a process that is warm (recovery.spares_warm).

The supervisor keeps one such process on each node, in a step of its own, for all attempts: see warm_parent.py. It forks
the agent, and this process lives for that fork: hands it its output and its signals, and ends as it ends. If this
process is killed, so is the agent. Standard library only: nothing here may wait for an import of torch.
"""

import contextlib
import hashlib
import json
import os
import signal
import socket
import struct
import time
from collections.abc import Sequence
from typing import NoReturn

from slurmddp.runtime.agent import forking

#: Set by the supervisor: the rendezvous id in the step of the warm processes.
NAME = "SLURMDDP_WARM"
#: In place of a file descriptor in forking.TEMPLATE.
PARENT = "warm"
#: Slurm and terminals send these to all processes of a step.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
#: Seconds in which the warm process may begin to listen, which is before it imports torch; and between two trials.
_PATIENCE, _PAUSE = 5.0, 0.05


def is_wanted() -> bool:
    return bool(os.environ.get(NAME))


def is_parent() -> bool:
    """Return whether this is the step of the warm processes."""
    return is_wanted() and os.environ[NAME] == os.environ.get("SLURMDDP_RENDEZVOUS_ID")


def address() -> str:
    """Return the socket's address: an abstract one, which needs no folder and ends with its process."""
    return "\0slurmddp-" + hashlib.sha256(os.fsencode(os.environ[NAME])).hexdigest()


def is_mine(connection: socket.socket) -> bool:
    """Return whether a process of this user is at the other end. Anybody on the node may open such a socket."""
    size = struct.calcsize("3i")
    uid: int = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[1]
    return uid == os.geteuid()


def be_agent(words: Sequence[str]) -> NoReturn:
    """Have the warm process fork the agent, and end as that ends. Raises NotPossible, with nothing forked."""
    connection = _connect()
    request = json.dumps([[*words], os.getcwd(), dict(os.environ)]).encode() + b"\n"
    before = {number: signal.signal(number, lambda number, _: _pass_on(connection, number)) for number in SIGNALS}
    try:
        socket.send_fds(connection, [b" "], [0, 1, 2])
        connection.sendall(request)
        lines = connection.makefile("rb")
        why = lines.readline()
    except OSError as error:
        why = f"the warm process of this node has ended ({error.strerror})\n".encode()
    if why != b"\n":
        for number, handler in before.items():
            signal.signal(number, handler)
        raise forking.NotPossible(why.decode().strip() or "the warm process of this node has ended")
    code = lines.readline()  # for as long as the agent lives
    _end(int(code) if code else 1)


def _connect() -> socket.socket:
    end = time.monotonic() + _PATIENCE
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(address())
        except OSError:
            connection.close()
            if time.monotonic() > end:
                raise forking.NotPossible("no warm process on this node: logs/warm may say why") from None
            time.sleep(_PAUSE)
            continue
        if not is_mine(connection):
            raise forking.NotPossible("another user listens in place of this node's warm process")
        return connection


def _pass_on(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # the agent has ended: so does this process
        connection.sendall(bytes([number]))


def _end(code: int) -> NoReturn:
    """End as the agent has ended: code below 0: by a signal, which Slurm tells the supervisor of."""
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(abs(code))
