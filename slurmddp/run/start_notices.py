"""What ranks of an own script told of their start: it may be that a run is done, and trained in vain."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from slurmddp.records.events import Event, of
from slurmddp.records.rank_events import NoProcessGroup, ProcessGroupMade, RankStarted, Restarted, SaveKept
from slurmddp.run.rank_starts import FROM_ZERO, UNKNOWN, WENT_ON

#: Characters of a text that is shown.
_LONGEST = 2000


def newest_restarts(events: Iterable[Event]) -> list[Event]:
    """Return what each start of the ranks told of what it went on from, oldest first: its newest word."""
    return [start.event for start in _starts(events) if start.event]


def start_notices(events: Iterable[Event]) -> tuple[str, ...]:
    """Return texts for people: that the newest start of the ranks has no process group, or began from an unknown step;
    and that starts began from step 1 again, and where what they may have written over is kept.
    """
    events = list(events)
    starts, saves = _starts(events), [facts for _, facts in of(events, SaveKept)]
    found = [starts[-1].alone] if starts[-1].alone else []
    restarts = [start.restarted for start in starts]
    if zero := [facts for facts in restarts if facts and facts.how == FROM_ZERO]:
        often = f" ({len(zero)} times in this run: {sum(facts.lost or 0 for facts in zero)} steps)"
        kept = next((f"; what it had saved is kept in {facts.kept}" for facts in saves if facts.kept), "")
        found.append(zero[-1].text[:_LONGEST] + (often if len(zero) > 1 else "") + kept)
    if (last := restarts[-1]) and (last.how == UNKNOWN or (last.how == WENT_ON and last.step is None)):
        found.append(last.text[:_LONGEST])
    if saves and saves[-1].why and not (last and last.how == WENT_ON):
        found.append(f"the script may write over {saves[-1].path}, of which there is no copy: {saves[-1].why}")
    return tuple(found)


@dataclass
class _Start:
    """A start of the ranks: its newest `restarted`, and the text of `no_process_group` while that holds."""

    event: Event | None = None
    restarted: Restarted | None = None
    alone: str = ""


def _starts(events: Iterable[Event]) -> list[_Start]:
    starts = [_Start()]
    for event in events:
        if isinstance(event.facts, RankStarted):
            starts.append(_Start())
        elif isinstance(event.facts, ProcessGroupMade):
            starts[-1].alone = ""
        elif isinstance(event.facts, NoProcessGroup):
            starts[-1].alone = event.facts.text[:_LONGEST]
        elif isinstance(event.facts, Restarted):
            starts[-1].event, starts[-1].restarted = event, event.facts
    return starts
