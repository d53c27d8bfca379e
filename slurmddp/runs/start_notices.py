"""What ranks of an own script told of their start: it may be that a run is done, and trained in vain."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slurmddp.records.values import whole
from slurmddp.runs.rank_starts import FROM_ZERO, UNKNOWN, WENT_ON

Event = Mapping[str, Any]

#: Characters of a text that is shown.
_LONGEST = 2000


def newest_restarts(events: Iterable[Event]) -> list[Event]:
    """Return what each start of the ranks told of what it went on from, oldest first: its newest word."""
    return [told["restarted"] for told in _starts(events) if "restarted" in told]


def start_notices(events: Iterable[Event]) -> tuple[str, ...]:
    """Return texts for people: that the newest start of the ranks has no process group, or began from an unknown step;
    and that starts began from step 1 again.
    """
    starts = list(_starts(events))
    newest = starts[-1] if starts else {}
    found = [_text(newest["no_process_group"])] if "no_process_group" in newest else []
    if zero := [told["restarted"] for told in starts if _how(told) == FROM_ZERO]:
        lost = sum(whole(event.get("lost")) or 0 for event in zero)
        often = f" ({len(zero)} times in this run: {lost} steps)" if len(zero) > 1 else ""
        found.append(_text(zero[-1]) + often)
    if _how(newest) == UNKNOWN or (_how(newest) == WENT_ON and newest["restarted"].get("step") is None):
        found.append(_text(newest["restarted"]))
    return tuple(found)


def _starts(events: Iterable[Event]) -> Sequence[Mapping[str, Event]]:
    """The newest event of each name, by start of the ranks."""
    starts: list[dict[str, Event]] = [{}]
    for event in events:
        name = str(event.get("event"))
        if name == "rank_started":
            starts.append({})
        elif name == "process_group_made":
            starts[-1].pop("no_process_group", None)
        elif name in ("no_process_group", "restarted"):
            starts[-1][name] = event
    return starts


def _how(told: Mapping[str, Event]) -> Any:
    return told.get("restarted", {}).get("how")


def _text(event: Event) -> str:
    return str(event.get("text") or "")[:_LONGEST]
