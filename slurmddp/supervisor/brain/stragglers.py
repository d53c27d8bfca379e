"""Nodes that are slower than the others, and which of them people are told of."""

from typing import Dict, NamedTuple, Optional, Union

from slurmddp.records.cause import NODE, Cause
from slurmddp.records.rank_events import StragglerBegins, StragglerEnds
from slurmddp.supervisor.brain.types import Actions, Alert

#: Seconds before an alert names a straggler: most recover.
SLOW_FOR = 300


class _Slow(NamedTuple):
    """since: seconds. told: once per start is enough."""

    since: float
    cause: Cause
    told: bool = False


class Stragglers:
    """Of one start of the ranks."""

    def __init__(self) -> None:
        self._slow: Dict[str, _Slow] = {}

    def see(self, event: Union[StragglerBegins, StragglerEnds], seconds: float) -> None:
        """Take an event."""
        before = self._slow.get(event.host)
        if before is not None and before.told:
            return
        self._slow.pop(event.host, None)
        cause = _cause(event) if isinstance(event, StragglerBegins) else None
        if cause is not None:
            self._slow[event.host] = _Slow(seconds, cause)

    def look(self, seconds: float) -> Actions:
        """Tell of the nodes that have been slow for long enough."""
        due = {host: slow for host, slow in self._slow.items() if not slow.told and seconds - slow.since >= SLOW_FOR}
        for host, slow in due.items():
            self._slow[host] = slow._replace(told=True)
        following = "training continues, at the speed of this node"
        return [Alert("straggler", "running", slow.cause, following) for slow in due.values()]


def _cause(event: StragglerBegins) -> Optional[Cause]:
    if not event.host or event.slow_rank is None or event.factor is None:
        return None
    text = "straggler: {} takes {:g} times as long as elsewhere".format(event.part, event.factor)
    return Cause(text, event.slow_rank, event.host, NODE)
