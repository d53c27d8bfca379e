"""Which nodes are lost: those that sent heartbeats and are silent now, although this process listened."""

from typing import Dict, NamedTuple, Set, Tuple

#: Seconds of silence after which a node is asked whether it lives, and after which it is lost.
ASK, LOST = 3.0, 5.0
#: Seconds in which another node was heard, if the network of this one works; and without a look, after which this
#: process was stopped or busy and may have missed heartbeats.
_RECENT, _LATE = 2.0, 2.0
#: Silent nodes at once that are more than a fault of nodes; asking each takes a descriptor.
_MANY = 128
NO_HEARTBEAT = "no heartbeat for {:.0f} s".format(LOST)


class Silent(NamedTuple):
    """ask: nodes to be asked whether they live. lost: nodes that are lost, each named once."""

    ask: Tuple[str, ...] = ()
    lost: Tuple[str, ...] = ()


class Heartbeats:
    """The nodes of a job, without that of this process. Times are seconds of a clock that nobody sets."""

    def __init__(self, now: float) -> None:
        self._alive: Dict[str, float] = {}  # when each node was heard last
        self._numbers: Dict[str, int] = {}  # of the newest heartbeat of each node
        self._lost: Set[str] = set()
        self._looked = now

    def heard(self, node: str, number: int, now: float) -> None:
        """Take a heartbeat. Its number rises: one that was sent again, or overtaken, is not from now."""
        if number > self._numbers.get(node, -1):
            self._numbers[node] = number
            self.lives(node, now)

    def lives(self, node: str, now: float) -> None:
        """Take a sign of life. A node that was declared lost stays lost: others may have its place by now."""
        if node not in self._lost:
            self._alive[node] = now

    def knows(self, node: str) -> bool:
        """Return whether a node was ever heard."""
        return node in self._numbers

    def hears(self, now: float) -> bool:
        """Return whether a node was heard just now: then the network of this one works."""
        return any(now - then <= _RECENT for then in self._alive.values())

    def look(self, now: float) -> Silent:
        """Return the silent nodes. Call this every half second."""
        late, self._looked = now - self._looked > _LATE, now
        if late:
            self._alive = dict.fromkeys(self._alive, now)
        silent = {node: now - then for node, then in self._alive.items()}
        ask = tuple(node for node, seconds in silent.items() if seconds > ASK)
        if len(ask) > _MANY or (len(silent) > 1 and not self.hears(now)):
            return Silent()  # a switch failed, this node is cut off, or none sends any more. Slurm knows which
        lost = tuple(node for node, seconds in silent.items() if seconds > LOST)
        for node in lost:
            del self._alive[node]
        self._lost.update(lost)
        return Silent(tuple(node for node in ask if node not in lost), lost)
