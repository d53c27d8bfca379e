"""What ranks of an own script told of their start, and what a run that is done may still have in vain."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

#: Characters of a text that is shown.
_LONGEST = 2000


def start_notices(events: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the texts for people: that the newest start of the ranks has no process group."""
    alone: Mapping[str, Any] = {}
    for event in events:
        name = event.get("event")
        if name == "no_process_group":
            alone = event
        elif name in ("rank_started", "process_group_made"):
            alone = {}
    return (_text(alone),) if alone else ()


def _text(event: Mapping[str, Any]) -> str:
    return str(event.get("text") or "")[:_LONGEST]
