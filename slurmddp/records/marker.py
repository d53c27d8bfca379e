"""The marker of an attempt: how it ended, if it ended cleanly."""

from typing import Any, Mapping, NamedTuple, Optional, Tuple

from slurmddp.records.values import whole


class Marker(NamedTuple):
    """What the supervisor reads of it. state: done, stopped, failed, no progress; empty if it cannot be read.

    signalled: rank and node of the rank that got a SIGTERM, if the ranks stopped for that; None: they did not.
    """

    state: str = ""
    reason: str = ""
    cause: str = ""
    signalled: Optional[Tuple[Optional[int], str]] = None


def read(record: Mapping[str, Any]) -> Marker:
    """Return what a marker's object says. Texts that are none are empty."""
    texts = [record.get(key) for key in ("state", "reason", "cause")]
    state, reason, cause = (text if isinstance(text, str) else "" for text in texts)
    signal, signalled = record.get("signal"), None
    if isinstance(signal, dict) and signal.get("name") == "SIGTERM" and isinstance(signal.get("node"), str):
        signalled = (whole(signal.get("rank")), signal["node"])
    return Marker(state, reason, cause, signalled)
