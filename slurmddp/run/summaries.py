"""What is known of runs that are over, so that a list of a thousand need not read a thousand folders."""

import contextlib
import json
import time
from pathlib import Path
from typing import Any

from slurmddp.run.index import state_folder
from slurmddp.run.layout import RunFolder
from slurmddp.run.state import RunState
from slurmddp.shared.files import read_json, write_whole

#: Raise it when the kept values change.
_VERSION = 2
#: A lost run may only be one that Slurm does not name for a while: its summary is kept from this age of its events on.
_LOST_AFTER = 86400.0


class Summaries:
    """A file in the user's state folder, which may be lost.

    A summary counts while events.jsonl stays as it was: whatever becomes of a run is written there.
    """

    def __init__(self) -> None:
        self._changed = False
        try:
            found = read_json(self._file())
            known = found["runs"] if found["version"] == _VERSION else {}
        except (OSError, RuntimeError, ValueError, KeyError, TypeError):
            known = {}
        self._known: dict[str, Any] = known if isinstance(known, dict) else {}

    def of(self, folder: RunFolder) -> dict[str, Any] | None:
        """Return the summary of a run; None if there is none that counts."""
        match self._known.get(str(folder.path)):
            case {"events": list() as events, "told": dict() as told} if events == _state(folder):
                return told
        return None

    def keep(self, folder: RunFolder, state: RunState, told: dict[str, Any]) -> None:
        """Keep the summary of a run, if it is over."""
        events = _state(folder)
        if state.going or state.state == "not submitted" or events is None:
            return
        if state.state == "lost" and time.time() - events[1] / 1e9 < _LOST_AFTER:
            return
        self._known[str(folder.path)] = {"events": events, "told": told}
        self._changed = True

    def save(self) -> None:
        """Write the file, if anything has changed. A full or read-only home costs time only."""
        if not self._changed:
            return
        text = json.dumps({"version": _VERSION, "runs": self._known})
        with contextlib.suppress(OSError, RuntimeError):
            self._file().parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._file(), text)

    @staticmethod
    def _file() -> Path:
        return state_folder() / "summaries.json"


def _state(folder: RunFolder) -> list[int] | None:
    """Return what changes with every line of events.jsonl."""
    try:
        facts = folder.events.stat()
    except OSError:
        return None
    return [facts.st_size, facts.st_mtime_ns, facts.st_ino]
