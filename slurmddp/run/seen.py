"""What an earlier run of the same script showed of it: events of the observer, which looked while it ran."""

from itertools import islice
from pathlib import Path
from typing import NamedTuple

from slurmddp.records.events import newest
from slurmddp.records.rank_events import CheckpointSaved, NoProcessGroup, ProcessGroupMade, Restarted, SaveKept
from slurmddp.run import index
from slurmddp.run.events import read_events

#: Runs that are looked at, newest first.
_LOOKED_AT = 30


class Seen(NamedTuple):
    """run: its id. process_group: False if several ranks trained without one. saves: True if it saved. loads: whether a
    start after an earlier one went on from what that had saved. None: not seen.
    """

    run: str
    process_group: bool | None = None
    saves: bool | None = None
    loads: bool | None = None


def seen(script: Path, copied: str) -> Seen | None:
    """Return what the newest run with the same script showed; None if there is none. copied: its path below the run
    folder. Only the script's own file is compared: modules that it imports may differ.
    """
    try:
        text = script.read_bytes()
        for entry in islice(index.entries(), _LOOKED_AT):
            copy = Path(entry.path) / copied
            if copy.is_file() and copy.read_bytes() == text and (found := _of_run(entry)):
                return found
    except OSError:
        return None  # a disk that does not answer says nothing of the script
    return None


def _of_run(entry: index.Entry) -> Seen | None:
    events = read_events(entry.folder.events, entry.folder.path).records
    groups = [each.facts for each in events if isinstance(each.facts, (NoProcessGroup, ProcessGroupMade))]
    group = False if groups and isinstance(groups[-1], NoProcessGroup) else None
    saved = True if newest(events, CheckpointSaved) or newest(events, SaveKept) else None
    restarted = newest(events, Restarted)
    loads = {"went on": True, "from zero": False}.get(restarted.how) if restarted and restarted.before else None
    found = Seen(entry.id, group, saved, loads)
    return found if found[1:] != (None, None, None) else None
