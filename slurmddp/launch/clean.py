"""`slurmddp clean`: removes run folders, or old checkpoints, of runs that are over."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from slurmddp.alerts import secrets
from slurmddp.errors import UserError
from slurmddp.launch.find import known_roots
from slurmddp.run import index, manifest, pruning
from slurmddp.run.checkpoints import Stored
from slurmddp.run.evidence import evidence_of
from slurmddp.run.gate import own, stranger
from slurmddp.run.layout import RunFolder
from slurmddp.run.pruning import Removal, Skipped
from slurmddp.run.state import RunState, judge
from slurmddp.run.unanswered import ask_about
from slurmddp.run.usage import changed, usage
from slurmddp.styled import labelled

#: A run whose scheduler does not know it, here, may be training on another cluster or machine that shares the folder:
#: it counts as active until nothing was written for so many seconds.
_QUIET = 86400.0


class Wanted(NamedTuple):
    """Which runs: named ones, else all known. before: only those that wrote nothing since (unix seconds); states: only
    those; keep: remove only checkpoints, and keep so many good ones of each run."""

    named: Sequence[RunFolder]
    before: float | None
    states: Collection[str]
    keep: int | None


def plan(
    wanted: Wanted, environment: Mapping[str, str], checked: Callable[[Stored], Stored], say: Callable[[str], None]
) -> tuple[list[Removal], list[Skipped]]:
    """Return what to remove, newest run first, and which of the runs stay. `checked` verifies a checkpoint.

    Raises UserError for a named run that must stay.
    """
    chosen, skipped = select(wanted, environment, say)
    found = []
    for folder, state in chosen:
        measured = usage(folder, lambda error: say(labelled("warning", f"{error.filename}: {error.strerror}")))
        if wanted.keep is None:
            found.append(Removal(measured, state))
            continue
        try:
            planned = pruning.plan(folder, keep=wanted.keep, keep_every=None, checked=checked)
        except UserError as error:
            skipped.append(Skipped(folder, error.what))
        else:
            found += [Removal(measured, state, planned)] if planned.going else []
    return found, skipped


def select(
    wanted: Wanted, environment: Mapping[str, str], say: Callable[[str], None]
) -> tuple[list[tuple[RunFolder, RunState]], list[Skipped]]:
    """Return the runs to work on, newest first, each with its state, and those that must stay.

    Raises UserError for a named run that must stay.
    """
    known = _known(wanted.named, environment)
    names = {_key(folder) for folder in wanted.named}
    folders = [folder for folder in known if not names or _key(folder) in names]
    continued = _continued(known)
    chosen: list[tuple[RunFolder, RunState]] = []
    skipped: list[Skipped] = []
    gone: set[str] = set()  # run folders that this removes
    for folder, state in _states(folders, say):
        if not _matches(folder, state, wanted):
            continue
        newer = [each for each in continued.get(_key(folder), ()) if _key(each) not in gone]
        if why := _why_not(folder, state, newer):
            skipped.append(Skipped(folder, why))
            continue
        chosen.append((folder, state))
        if wanted.keep is None:
            gone.add(_key(folder))
    if wanted.named and skipped:
        folder, why = skipped[0]
        raise UserError(f"run {folder.id} must stay: {why}", where=str(folder.path), todo="remove it from the list")
    return chosen, skipped


def carry_out(
    planned: Sequence[Removal], wanted: Wanted, environment: Mapping[str, str], say: Callable[[str], None]
) -> Iterator[tuple[Removal, OSError | None]]:
    """Remove what was planned, and yield each run as soon as it is gone, or with the error that kept it.

    Runs are looked at once more before: one may have been requeued, or resumed from, while the user read the list.
    """
    still = {_key(folder) for folder, _ in select(wanted, environment, say)[0]}
    for removal in planned:
        if _key(removal.folder) not in still:
            say(labelled("warning", f"run {removal.folder.id} has changed: it stays"))
            continue
        try:
            run = own(removal.folder, to="clean it")
            if removal.pruning is None:
                run.remove_all()
                secrets.forget(removal.folder.id, environment)
            else:
                for _ in pruning.prune(run, removal.pruning):
                    pass
        except OSError as error:
            yield removal, error
        else:
            yield removal, None


def _known(named: Sequence[RunFolder], environment: Mapping[str, str]) -> list[RunFolder]:
    """All runs, newest first; also those that the index lacks: they may resume from one that is to go."""
    entries = index.entries()
    parents = {folder.path.parent for folder in (*named, *(entry.folder for entry in entries))}
    found = {entry.id: entry for entry in (*entries, *index.rebuild(parents or known_roots(environment)))}
    newest_first = sorted(found.values(), key=lambda entry: (entry.when, entry.id), reverse=True)
    known = {_key(folder): folder for folder in (*(entry.folder for entry in newest_first), *named)}
    return list(known.values())


def _key(folder: RunFolder) -> str:
    """Return a folder's name however it was spelled; a link is not what it leads to."""
    return os.path.join(os.path.realpath(folder.path.parent), folder.path.name)


def _continued(known: Sequence[RunFolder]) -> dict[str, list[RunFolder]]:
    """Return by run the newer runs that resume from it."""
    by_id = {folder.id: folder for folder in known}
    found: dict[str, list[RunFolder]] = {}
    for folder in known:
        try:
            earlier = manifest.read(folder)["resumed_from"]
        except (UserError, KeyError):
            continue
        for text in earlier if isinstance(earlier, list) else ():
            before = by_id.get(str(text)) or RunFolder(folder.path / str(text))
            found.setdefault(_key(before), []).append(folder)
    return found


def _states(folders: Sequence[RunFolder], say: Callable[[str], None]) -> Iterator[tuple[RunFolder, RunState]]:
    """Yield the state of each run; the schedulers are asked once for all."""
    asked = ask_about(evidence_of(folders, say), say)
    for folder, facts in asked.runs:
        answered = asked.answered(facts)
        states = [judge(asked.views.get(job_id), facts, answered=answered) for job_id in facts.job_ids] or [
            judge(None, facts, answered=answered)
        ]
        yield folder, next((state for state in states if state.going), states[-1])


def _matches(folder: RunFolder, state: RunState, wanted: Wanted) -> bool:
    """Return whether a run is asked for. One that may be active is, where it is named or its state is."""
    if wanted.states and state.state not in wanted.states:
        return False
    if not wanted.states and not wanted.named and (state.going or state.state == "lost"):
        return False
    return wanted.before is None or changed(folder) < wanted.before


def _why_not(folder: RunFolder, state: RunState, newer: Sequence[RunFolder]) -> str | None:
    """Return why a run must stay; None if it may go. newer: runs that resume from it and stay."""
    if folder.path.is_symlink():
        return "its folder is a link"
    if folder.checkpoints.is_symlink():
        return "its checkpoints are behind a link: remove the link first"
    if why := stranger(folder):
        return f"it {why}"
    if state.going:
        return f"it is still {state.state}"
    if state.state in ("lost", "not submitted") and time.time() - changed(folder) < _QUIET:
        return f"it is {state.state}, and wrote files in the last 24 hours: it may still run on another machine"
    if newer:
        return f"the newer run {newer[0].id} resumes from it"
    return None
