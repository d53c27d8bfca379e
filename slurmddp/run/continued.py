"""Which runs continue a run (--resume): a numbered file each in its folder, so that two at once see each other.

The files are made with O_EXCL and never removed. A run that is over, or whose folder is gone, is no obstacle.
"""

import json
import time
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from slurmddp.errors import ExternalError, UserError
from slurmddp.run.evidence import Evidence, evidence
from slurmddp.run.gate import OwnRun
from slurmddp.run.layout import RunFolder
from slurmddp.run.state import judge, observe
from slurmddp.shared.files import read_json

#: Seconds for which a run that has no job yet is taken for one that is just being submitted.
SUBMITTING = 150.0


class Claim(NamedTuple):
    """A run that continues another one. name: that of its job; path: its folder; time: of its submission."""

    name: str
    path: str
    time: str

    @property
    def folder(self) -> RunFolder:
        return RunFolder(Path(self.path))


def claim(source: OwnRun, name: str, folder: RunFolder) -> None:
    """Note that the run in this folder continues `source`. Raises UserError if one of the same name does, and goes on.

    Raises OSError where the folder of `source` cannot be written.
    """
    own = Claim(name, str(folder.path), datetime.now().astimezone().isoformat(timespec="seconds"))
    source.held.make(source.continued)
    number = 0
    while True:
        number += 1
        path = source.continued / f"{number:04d}.json"
        if source.held.write_new(path, json.dumps(own._asdict()) + "\n"):
            return
        other = _read(source, number)
        if other is None or other.name != name or not (how := _goes_on(other)):
            continue
        todo = f"to follow it: slurmddp status {other.folder.id}; to train both, give this one another name: --name"
        raise UserError(f"run {other.folder.id} continues run {source.id} already: it is {how}", todo=todo)


def _read(source: OwnRun, number: int) -> Claim | None:
    """Return what a file says; None if it is damaged."""
    path = source.continued / f"{number:04d}.json"
    for _ in range(20):
        try:
            found = read_json(path, source.path)
            return Claim(*(str(found[key]) for key in Claim._fields))
        except (KeyError, TypeError):
            return None
        except ValueError:  # its writer has just made it
            time.sleep(0.05)
    return None


def _goes_on(other: Claim) -> str:
    """Return how a run that is not over is, for people; empty if it is over, was never submitted, or is gone."""
    if not other.folder.exists:
        return ""
    try:
        facts, view = observe(other.folder)
        state, job = judge(view, facts), facts.job_id
    except (ExternalError, UserError, OSError):  # the scheduler does not answer
        try:
            facts = evidence(other.folder)
        except (UserError, OSError):
            return ""
        state, job = judge(None, facts, answered=False), facts.job_id
    if state.going:
        return f"{state.state}, job {job or 'unknown'}"
    return "being submitted" if _is_new(facts, other) else ""


def _is_new(facts: Evidence, other: Claim) -> bool:
    """Return whether a run without a job may be one whose submission is under way."""
    if facts.started is not None or facts.job_id is not None or (facts.submission and facts.submission.failed):
        return False
    try:
        begun = datetime.fromisoformat(other.time).timestamp()
    except ValueError:
        return False
    return abs(time.time() - begun) < SUBMITTING
