"""A line of bad-nodes.jsonl, beside the index of runs: what the user said of a node."""

from typing import Any, Dict, Mapping, NamedTuple, Optional

from slurmddp.records.values import number

VERSION = 1


class UserNote(NamedTuple):
    """A node of a site to avoid. reason: None if the node is to be used again. time: unix seconds."""

    site: str
    node: str
    reason: Optional[str]
    time: float

    def write(self) -> Dict[str, Any]:
        return dict(self._asdict(), schema=VERSION, time=round(self.time, 3))


def read(record: Mapping[str, Any]) -> Optional[UserNote]:
    """Return what a line's object says; None if it is not sound."""
    site, node, reason, time = (record.get(key) for key in ("site", "node", "reason", "time"))
    when = number(time)
    if not isinstance(site, str) or not isinstance(node, str) or when is None:
        return None
    return UserNote(site, node, reason if isinstance(reason, str) else None, when)
