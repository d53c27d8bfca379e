"""Before the ranks of a script of the user's own start: the agent of the first node chooses the save that all of them
may load (slurmddp/records/next_save.py).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slurmddp.records import next_save
from slurmddp.runtime.environment import RESUME
from slurmddp.runtime.journal import Events, read_events
from slurmddp.shared.run_folder import RunFolder


@dataclass(frozen=True)
class Saves:
    """watch: where the script saves, besides the run's checkpoints/. earlier: checkpoints/ of runs before this one."""

    folder: RunFolder
    events: Events
    watch: Sequence[str]
    earlier: Sequence[str]

    def before_start(self) -> str:
        """Return the newest whole save of the run, after it was kept if need be; empty without one."""
        places = next_save.Places(str(self.folder.path), self.watch, self.earlier)
        return next_save.before_start(places, read_events(self.folder.events, *next_save.KINDS), self.events.write)


def read(environ: Mapping[str, str], folder: RunFolder, events: Events) -> Saves | None:
    """Return what the job says of the saves of its script; None for a bundled task."""
    if RESUME not in environ:
        return None
    earlier = [path for path in environ.get("SLURMDDP_RESUME_FROM", "").split(":") if path]
    return Saves(folder, events, json.loads(environ[RESUME])["watch"], earlier)
