"""Heartbeats from the guard on each node to the supervisor: signed UDP datagrams, without the run folder and Slurm."""

import errno
import os
import socket
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

from slurmddp.records.job_events import Heartbeats as Heard
from slurmddp.records.job_events import NodeExcluded
from slurmddp.records.signed import ForgedError, Key
from slurmddp.supervisor.brain.heartbeats import NO_HEARTBEAT, Heartbeats

#: Seconds between two heartbeats, and between two looks; and in which each node sends its first one.
EVERY, _FIRST = 0.5, 60.0
#: Bytes of a datagram, at most, and how many are read before the loop does something else.
_LONGEST, _AT_ONCE = 1024, 1000
#: Of a connection to a port where nobody listens: the kernel of a node that lives answers.
_ANSWERS = (0, errno.EISCONN, errno.ECONNREFUSED, errno.ECONNRESET)


def _udp() -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.setblocking(False)
    return made


class Sender:
    """Sends the heartbeats of this node. where: what `Receiver.where` says."""

    def __init__(self, key: Key, where: str, node: str) -> None:
        host, port, self._belongs = where.split()
        self._key, self._node, self._socket = key, node, _udp()
        self._to = socket.getaddrinfo(host, int(port), socket.AF_INET, socket.SOCK_DGRAM)[0][4]

    def send(self) -> None:
        # Also a guard that is started again sends rising numbers.
        content = "{} {}".format(int(time.monotonic() * 1000), self._node)
        try:
            self._socket.sendto(self._key.seal(content.encode(), "heartbeat", self._belongs), self._to)
        except OSError:
            pass  # there is no network now: this is what the supervisor finds out


class Receiver:
    """Takes the heartbeats of all nodes, and excludes nodes that are lost. where: for the guards; see Sender."""

    def __init__(self, job: Any, key: Key, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises OSError."""
        self._job, self._key, self._clock = job, key, clock
        self._socket = _udp()
        self._socket.bind(("", 0))
        self._port, self._belongs = self._socket.getsockname()[1], os.urandom(8).hex()
        self.where = "{} {} {}".format(job.scheduler.host, self._port, self._belongs)
        self._beats, self._began = Heartbeats(clock()), clock()
        self.hears: Callable[[bool], None] = lambda hears: None  # called at each look: was another node heard just now?
        self._told: Optional[List[str]] = None  # nodes without heartbeats, as they were recorded
        self._addresses: Dict[str, Tuple[str, int]] = {}
        self._probes: Dict[str, socket.socket] = {}

    def start(self) -> None:
        self._job.loop.watch(self._socket.fileno(), self.receive)
        self._job.loop.every(EVERY, self.look)

    def receive(self) -> None:
        """Take the datagrams that are there. What is not signed for this job is dropped."""
        for _ in range(_AT_ONCE):
            try:
                data, address = self._socket.recvfrom(_LONGEST)
            except BlockingIOError:
                return
            try:
                content = self._key.open(data, "heartbeat", self._belongs)
            except ForgedError:
                continue
            number, _, node = content.decode().partition(" ")
            if node != self._job.scheduler.host:
                self._addresses[node] = address
                self._beats.heard(node, int(number), self._clock())

    def look(self) -> None:
        """Look for nodes that are lost."""
        self.receive()
        now, job = self._clock(), self._job
        self._tell(now)
        self.hears(self._beats.hears(now))
        silent = self._beats.look(now)
        for node in set(self._probes) - set(silent.ask):
            self._probes.pop(node).close()
        for node in silent.ask:
            if self._answers(node):
                self._beats.lives(node, now)
        lost = [node for node in silent.lost if node in job.nodes.usable]
        if lost and not job.ending:
            job.exclude(NO_HEARTBEAT, lost, NodeExcluded)
            if job.nodes.lost and job.child is not None:
                job.child.kill(job.abort)

    def _answers(self, node: str) -> bool:
        """Return whether the kernel of a node has answered: then only its guard was stopped, or died."""
        if node not in self._probes:
            self._probes[node] = socket.socket()
            self._probes[node].setblocking(False)
        return self._probes[node].connect_ex(self._addresses[node]) in _ANSWERS

    def _tell(self, now: float) -> None:
        """Record from which nodes there are no heartbeats, and when that changes."""
        nodes = [node for node in self._job.nodes.usable if node != self._job.scheduler.host]
        silent = [node for node in nodes if not self._beats.knows(node)]
        if silent != self._told and (not silent or now - self._began > _FIRST):
            self._told = silent
            self._job.event(Heard(len(nodes) - len(silent), " ".join(silent), self._port))
