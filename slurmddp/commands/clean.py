"""clean: what runs and images take on disk, and removing it."""

import os
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import typer

from slurmddp.alerts import secrets
from slurmddp.commands import options as opt
from slurmddp.commands.checkpoint import checked
from slurmddp.commands.image import removal_dict, removal_text
from slurmddp.commands.runs import age_text, checked_states, moment
from slurmddp.errors import UserError
from slurmddp.images.inventory import held, removable, remove
from slurmddp.launch.find import find_run, known_roots, known_runs
from slurmddp.launch.image import used_images
from slurmddp.run import checkpoints, index, manifest
from slurmddp.run.checkpoints import Pruning
from slurmddp.run.evidence import evidence_of
from slurmddp.run.gate import own, stranger
from slurmddp.run.layout import RunFolder
from slurmddp.run.state import RunState, judge
from slurmddp.run.unanswered import ask_about
from slurmddp.run.usage import Usage, changed, usage
from slurmddp.shared.units import human
from slurmddp.styled import columns, labelled
from slurmddp.visible import one_line

#: Seconds without a write after which a run is over that the scheduler here does not know: it may be training on
#: another cluster or machine that shares the folder.
_QUIET = 86400.0


class Wanted(NamedTuple):
    """Which runs: named ones, else all known. before: only those that wrote nothing since (unix seconds); states: only
    those; keep: remove only checkpoints, but for this number of good ones of each run."""

    named: Sequence[RunFolder]
    before: float | None
    states: Collection[str]
    keep: int | None


class Removal(NamedTuple):
    """What is to be removed of a run: all of it, or with `pruning` that."""

    usage: Usage
    state: RunState
    pruning: Pruning | None = None

    @property
    def folder(self) -> RunFolder:
        return self.usage.folder

    @property
    def bytes(self) -> int:
        return self.usage.bytes if self.pruning is None else self.pruning.bytes

    def lines(self) -> Iterator[str]:
        """Yield what is to be removed, and its size."""
        about = f"{self.state.state}, {age_text(time.time() - self.usage.changed)} old"
        if self.pruning is None:
            yield one_line(f"remove  {self.folder.path} ({about}, {self.usage.files} files): {human(self.bytes)}")
        for each in self.pruning.going if self.pruning else ():
            yield one_line(f"remove  {each.path} ({about}): {human(each.bytes)}")


class Skipped(NamedTuple):
    """A run that was asked for and stays."""

    folder: RunFolder
    why: str


def _total(removals: Sequence[Removal]) -> str:
    pruned = sum(len(item.pruning.going) for item in removals if item.pruning)
    what = f"{len(removals)} run{'s' * (len(removals) != 1)}"
    if pruned:
        what = f"{pruned} checkpoint{'s' * (pruned != 1)} of {what}"
    return f"{what}, {human(sum(item.bytes for item in removals))}"


def _facts(removals: Sequence[Removal], skipped: Sequence[Skipped], *, done: bool) -> dict[str, Any]:
    """Return what was, or with done=False would be, removed, for --json. The keys are stable. checkpoints: null where
    the whole run folder is meant."""
    return {
        "removed": [
            {
                "run_id": item.folder.id,
                "run_folder": str(item.folder.path),
                "state": item.state.state,
                "bytes": item.bytes,
                "checkpoints": [str(each.path) for each in item.pruning.going] if item.pruning else None,
            }
            for item in removals
        ],
        "kept": [{"run_id": item.folder.id, "why": item.why} for item in skipped],
        "bytes": sum(item.bytes for item in removals),
        "done": done,
    }


def _usage(folder: RunFolder) -> Usage:
    return usage(folder, lambda error: opt.say(labelled("warning", f"{error.filename}: {error.strerror}")))


def _plan(wanted: Wanted) -> tuple[list[Removal], list[Skipped]]:
    """Return what to remove, newest run first, and which runs stay. Raises UserError for a named one of these."""
    chosen, skipped = _select(wanted)
    removals = []
    for folder, state in chosen:
        measured = _usage(folder)
        if wanted.keep is None:
            removals.append(Removal(measured, state))
            continue
        try:
            planned = checkpoints.plan_pruning(folder, keep=wanted.keep, keep_every=None, checked=checked)
        except UserError as error:
            skipped.append(Skipped(folder, error.what))
        else:
            removals += [Removal(measured, state, planned)] if planned.going else []
    return removals, skipped


def _select(wanted: Wanted) -> tuple[list[tuple[RunFolder, RunState]], list[Skipped]]:
    """Return the runs to work on, newest first, each with its state, and those that must stay.

    Raises UserError for a named run that must stay.
    """
    known = _known(wanted.named)
    names = {_key(folder) for folder in wanted.named}
    continued = _continued(known)
    chosen: list[tuple[RunFolder, RunState]] = []
    skipped: list[Skipped] = []
    gone: set[str] = set()  # run folders that this removes
    for folder, state in _states([folder for folder in known if not names or _key(folder) in names]):
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


def _known(named: Sequence[RunFolder]) -> list[RunFolder]:
    """All runs, newest first; also those that the index lacks: they may resume from one that is to go."""
    entries = index.entries()
    parents = {folder.path.parent for folder in (*named, *(entry.folder for entry in entries))}
    by_id = {entry.id: entry for entry in (*entries, *index.rebuild(parents or known_roots(os.environ)))}
    newest_first = sorted(by_id.values(), key=lambda entry: (entry.when, entry.id), reverse=True)
    known = {_key(folder): folder for folder in (*(entry.folder for entry in newest_first), *named)}
    return list(known.values())


def _key(folder: RunFolder) -> str:
    """Return a folder's name however it was spelled; a link is not what it leads to."""
    return os.path.join(os.path.realpath(folder.path.parent), folder.path.name)


def _continued(known: Sequence[RunFolder]) -> dict[str, list[RunFolder]]:
    """Return by run the newer runs that resume from it."""
    by_id = {folder.id: folder for folder in known}
    continued: dict[str, list[RunFolder]] = {}
    for folder in known:
        try:
            earlier = manifest.read(folder)["resumed_from"]
        except (UserError, KeyError):
            continue
        for text in earlier if isinstance(earlier, list) else ():
            before = by_id.get(str(text)) or RunFolder(folder.path / str(text))
            continued.setdefault(_key(before), []).append(folder)
    return continued


def _states(folders: Sequence[RunFolder]) -> Iterator[tuple[RunFolder, RunState]]:
    """Yield the state of each run; the schedulers are asked once for all."""
    asked = ask_about(evidence_of(folders, opt.say), opt.say)
    for folder, facts in asked.runs:
        views = [asked.views.get(job_id) for job_id in facts.job_ids] or [None]
        states = [judge(view, facts, answered=asked.answered(facts)) for view in views]
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


def _may_remove(*, yes: bool) -> None:
    """Ask. Raises UserError where nobody can be asked, and typer.Abort for a no."""
    if yes:
        return
    if not sys.stdin.isatty():
        todo = "add --yes to remove all of this"
        raise UserError("nothing was removed: slurmddp cannot ask you without a terminal", todo=todo)
    typer.confirm("Remove all of this?", abort=True, err=True)


def _show_usage(*, as_json: bool) -> None:
    """Show one line per run, the largest first, and one for all. AGE: since the run last wrote anything."""
    runs = sorted(
        map(_usage, (entry.folder for entry in known_runs(os.environ))), key=lambda run: (-run.bytes, run.folder.id)
    )
    rows: list[tuple[str, ...]] = [("RUN", "SIZE", "CHECKPOINTS", "LOGS", "FILES", "AGE")]
    for run in runs:
        sizes = map(human, (run.bytes, run.checkpoints, run.logs))
        rows.append((one_line(run.folder.id), *sizes, str(run.files), age_text(time.time() - run.changed)))
    if len(runs) > 1:
        sums = map(sum, zip(*((run.bytes, run.checkpoints, run.logs) for run in runs), strict=True))
        rows.append((f"{len(runs)} runs", *map(human, sums), str(sum(run.files for run in runs)), ""))
    facts = [
        {
            "run_id": run.folder.id,
            "run_folder": str(run.folder.path),
            "bytes": run.bytes,
            "files": run.files,
            "checkpoints": run.checkpoints,
            "logs": run.logs,
            "changed": round(run.changed, 3),
        }
        for run in runs
    ]
    opt.show(as_json, facts, columns(rows, left=1) if runs else "no runs")
    if runs and not as_json:
        opt.say("to remove some: slurmddp clean RUN, --older-than 30d or --state failed; it asks first")


def _clean_runs(wanted: Wanted, *, yes: bool, as_json: bool) -> None:
    planned, skipped = _plan(wanted)
    if not as_json:
        for item in skipped:
            typer.echo(one_line(f"stays   {item.folder.id}: {item.why}"))
        for line in (line for removal in planned for line in removal.lines()):
            typer.echo(line)
        typer.echo(_total(planned) if planned else "nothing to remove")
    elif planned and not yes and not sys.stdin.isatty():
        typer.echo(opt.json_text(_facts(planned, skipped, done=False)))
    if planned:
        _may_remove(yes=yes)
    gone, failed = [], False
    # Once more: a run may have been requeued, or resumed from, while the user read the list.
    still = {_key(folder) for folder, _ in _select(wanted)[0]}
    for removal in planned:
        if _key(removal.folder) not in still:
            opt.say(labelled("warning", f"run {removal.folder.id} has changed: it stays"))
            continue
        try:
            _remove(removal)
            gone.append(removal)
        except OSError as error:
            failed = True
            opt.say(labelled("error", f"run {removal.folder.id} stays: {error.filename}: {error.strerror}"))
    if as_json:
        typer.echo(opt.json_text(_facts(gone, skipped, done=True)))
    elif planned:
        typer.echo(f"removed: {_total(gone)}")
    raise typer.Exit(int(failed))


def _remove(removal: Removal) -> None:
    run = own(removal.folder, to="clean it")
    if removal.pruning is None:
        run.remove_all()
        secrets.forget(run.id, os.environ)
    else:
        list(checkpoints.prune(run, removal.pruning))


def _clean_images(folder: Path, keep: int, *, yes: bool, as_json: bool) -> None:
    with held(folder) as opened:
        old = removable(opened, keep, used_images())
    if not as_json:
        typer.echo(removal_text(old, done=False))
    elif old and not yes and not sys.stdin.isatty():
        typer.echo(opt.json_text(removal_dict(old, done=False)))
    if old:
        _may_remove(yes=yes)
    shown = {item.paths[0].name for item in old}
    with held(folder) as opened:  # once more: a run may have taken one while the user read the list
        gone = [item for item in removable(opened, keep, used_images()) if item.paths[0].name in shown]
        for path in (path for item in gone for path in item.paths):
            try:
                remove(path)
            except OSError as error:
                raise UserError(f"cannot remove {path.name}: {error.strerror}", where=str(folder)) from None
    if as_json:
        typer.echo(opt.json_text(removal_dict(gone, done=True)))
    elif old:
        typer.echo(removal_text(gone, done=True))


def clean(
    runs: list[str] | None = opt.argument(
        "RUN", "Run ids, job ids, run folders, or last  [default: all]", complete=opt.run_names
    ),
    older_than: str | None = opt.value("TIME", "Only runs that wrote nothing since: 12h, 30d, 8w or 2026-11-30"),
    state: list[str] | None = opt.value("STATE", "Only runs in this state; may be repeated", complete=opt.run_states),
    keep: int | None = opt.value(
        "N",
        "Remove only checkpoints; keep the N newest good ones of each run. With --images: keep the N newest "
        "of each recipe  [default: 1]",
        min=0,
    ),
    images: Path | None = opt.value("FOLDER", "Remove old images that none of your runs uses, in place of runs"),
    yes: bool = opt.flag("--yes", "Do not ask"),
    as_json: opt.Json = False,
) -> None:
    """List the disk space of your runs, the largest first. With RUN or an option: remove run folders, old checkpoints
    or old images, after it has shown them and asked. Active runs stay, and runs that a newer run resumes from."""
    if images is not None:
        if runs or older_than or state:
            raise UserError("--images cannot be combined with runs", todo="run the command twice")
        _clean_images(images, 1 if keep is None else keep, yes=yes, as_json=as_json)
    elif runs or older_than or state:
        if keep == 0:
            raise UserError("--keep 0 would remove the newest checkpoint", todo="name the runs without --keep")
        before = moment("--older-than", older_than).timestamp() if older_than else None
        named = [find_run(text, os.environ) for text in runs or ()]
        _clean_runs(Wanted(named, before, checked_states(state or ()), keep), yes=yes, as_json=as_json)
    elif yes or keep is not None:
        raise UserError("name runs to clean, or choose them", todo="for example --older-than 30d, or --state failed")
    else:
        _show_usage(as_json=as_json)
