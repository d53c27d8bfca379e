"""Finds a run by what a user calls it."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmddp.errors import UserError
from slurmddp.records.events import of
from slurmddp.records.job_events import Requeued
from slurmddp.run import index, manifest
from slurmddp.run.gate import OwnRun, own
from slurmddp.run.index import Entry
from slurmddp.run.layout import RunFolder

#: Runs, the newest, whose events are read for a job number that the index does not know.
_LOOKED_AT = 100


def find_run(text: str, environment: Mapping[str, str]) -> RunFolder:
    """RUN: id, prefix, job id, folder or `last`.

    Raises UserError that names the nearest ones, and for a run of another version of slurmddp.
    """
    folder = find_any_version(text, environment)
    manifest.require_version(folder)
    return folder


def find_any_version(text: str, environment: Mapping[str, str]) -> RunFolder:
    """Return the run that `text` names, whichever slurmddp made it: little in its folder may be read."""
    try:
        return index.find(text)
    except UserError:
        if text.isdecimal() and (chained := _chained(text)):
            return chained
        # Perhaps the index was lost: look where runs are by default, which costs a look at every profile.
        return index.find(text, known_roots(environment))


def find_own_run(text: str, environment: Mapping[str, str], *, to: str, todo: str | None = None) -> OwnRun:
    """Return the run that `text` names, if it is this user's. to: as for `gate.own`. Raises UserError."""
    return own(find_run(text, environment), to=to, todo=todo)


def known_runs(environment: Mapping[str, str]) -> list[Entry]:
    """Return the runs of the index, newest first; those that are found on disk if the index is empty."""
    return index.entries() or index.rebuild(known_roots(environment))


def _chained(number: str) -> RunFolder | None:
    """Return the run that continued in this chained job: the index knows only the first job."""
    from slurmddp.run.events import read_events

    for entry in index.entries()[:_LOOKED_AT]:
        try:
            events = read_events(entry.folder.events, entry.folder.path).records
        except OSError:
            continue
        if any(facts.next_job == number for _, facts in of(events, Requeued)):
            return entry.folder
    return None


def known_roots(environment: Mapping[str, str]) -> list[Path]:
    """Folders that hold runs, as far as one can know without a job: for an index that was lost."""
    from slurmddp.job.document import read_file
    from slurmddp.job.expand import Expander
    from slurmddp.sites.catalogue import Catalogue, config_files

    catalogue = Catalogue(environment)
    written: list[Any] = ["runs"]
    for path in config_files(environment):
        written.append(_runs_of(read_file(path, "configuration").tree))
    for name in catalogue.names():
        try:
            written.append(_runs_of(catalogue.layered(name).tree.get("job")))
        except UserError:
            continue  # a broken profile of the user's must not hide the runs of the others
    expander = Expander(environment)
    roots = [expander.text(text, ()) for text in written if isinstance(text, str)]
    return [Path(os.path.abspath(root)) for root in dict.fromkeys(roots) if "$" not in root]


def _runs_of(job: Any) -> Any:
    """`paths.runs` of a layer that nobody has validated yet."""
    paths = job.get("paths") if isinstance(job, dict) else None
    return paths.get("runs") if isinstance(paths, dict) else None
