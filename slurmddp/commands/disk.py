"""clean: what runs and images take on disk, and removing it."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slurmddp.commands import options as opt
from slurmddp.commands.follow import Json
from slurmddp.commands.help import App
from slurmddp.styled import labelled

if TYPE_CHECKING:
    from slurmddp.launch.clean import Wanted
    from slurmddp.run.layout import RunFolder

Runs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RUN", help="Run ids, job ids, run folders, or last  [default: all]", autocompletion=opt.run_names
    ),
]


def register(app: App) -> None:
    """Put the command on the app."""
    app.add("Runs", clean, example="slurmddp clean --older-than 30d --state failed")


def _folders(runs: list[str] | None) -> "list[RunFolder]":
    from slurmddp.launch.find import find_run

    return [find_run(text, os.environ) for text in runs or ()]


def clean(
    runs: Runs = None,
    older_than: Annotated[
        str | None, typer.Option(metavar="TIME", help="Only runs that wrote nothing since: 12h, 30d, 8w or 2026-11-30")
    ] = None,
    state: Annotated[
        list[str] | None,
        typer.Option(metavar="STATE", help="Only runs in this state; may be repeated", autocompletion=opt.run_states),
    ] = None,
    keep: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Remove only checkpoints; keep the N newest good ones of each run. With --images: keep the N newest "
            "of each recipe  [default: 1]",
        ),
    ] = None,
    images: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Remove old images that none of your runs uses, in place of runs"),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask")] = False,
    as_json: Json = False,
) -> None:
    """List the disk space of your runs, the largest first. With RUN or an option: remove run folders, old checkpoints
    or old images, after it has shown them and asked. Active runs stay, and runs that a newer run resumes from."""
    from slurmddp.errors import UserError
    from slurmddp.launch.clean import Wanted
    from slurmddp.report.runs import checked_states, moment

    if images is not None:
        if runs or older_than or state:
            raise UserError("--images cannot be combined with runs", todo="run the command twice")
        _clean_images(images, 1 if keep is None else keep, yes=yes, as_json=as_json)
    elif runs or older_than or state:
        if keep == 0:
            raise UserError("--keep 0 would remove the newest checkpoint", todo="name the runs without --keep")
        before = moment("--older-than", older_than).timestamp() if older_than else None
        _clean_runs(Wanted(_folders(runs), before, checked_states(state or ()), keep), yes=yes, as_json=as_json)
    elif yes or keep is not None:
        raise UserError("name runs to clean, or choose them", todo="for example --older-than 30d, or --state failed")
    else:
        _show_usage(as_json=as_json)


def _show_usage(*, as_json: bool) -> None:
    from slurmddp.launch.find import known_runs
    from slurmddp.report.usage import as_dict, biggest_first, table
    from slurmddp.run.usage import usage

    found = biggest_first(
        usage(entry.folder, lambda error: opt.say(labelled("warning", f"{error.filename}: {error.strerror}")))
        for entry in known_runs(os.environ)
    )
    typer.echo(opt.json_text([as_dict(item) for item in found]) if as_json else table(found))
    if found and not as_json:
        opt.say("to remove some: slurmddp clean RUN, --older-than 30d or --state failed; it asks first")


def _may_remove(*, yes: bool) -> None:
    """Ask. Raises UserError where nobody can be asked, and typer.Abort for a no."""
    from slurmddp.errors import UserError

    if yes:
        return
    if not sys.stdin.isatty():
        raise UserError(
            "nothing was removed: slurmddp cannot ask you without a terminal", todo="add --yes to remove all of this"
        )
    typer.confirm("Remove all of this?", abort=True, err=True)


def _clean_runs(wanted: "Wanted", *, yes: bool, as_json: bool) -> None:
    from slurmddp.launch.clean import carry_out, plan
    from slurmddp.report.checkpoints import checked
    from slurmddp.report.usage import clean_dict, clean_lines, removed_line

    planned, skipped = plan(wanted, os.environ, lambda item: checked(item, opt.say), opt.say)
    if not as_json:
        typer.echo("\n".join(clean_lines(planned, skipped)))
    elif planned and not yes and not sys.stdin.isatty():
        typer.echo(opt.json_text(clean_dict(planned, skipped, done=False)))
    if planned:
        _may_remove(yes=yes)
    gone = []
    failed = False
    for removal, error in carry_out(planned, wanted, os.environ, opt.say):
        if error is None:
            gone.append(removal)
        else:
            failed = True
            opt.say(labelled("error", f"run {removal.folder.id} stays: {error.filename}: {error.strerror}"))
    if as_json:
        typer.echo(opt.json_text(clean_dict(gone, skipped, done=True)))
    elif planned:
        typer.echo(removed_line(gone))
    raise typer.Exit(int(failed))


def _clean_images(folder: Path, keep: int, *, yes: bool, as_json: bool) -> None:
    from slurmddp.errors import UserError
    from slurmddp.images.inventory import held, removable, remove
    from slurmddp.launch.image import used_images
    from slurmddp.report.images import removal, removal_dict

    with held(folder) as opened:
        found = removable(opened, keep, used_images())
    if not as_json:
        typer.echo(removal(found, done=False))
    elif found and not yes and not sys.stdin.isatty():
        typer.echo(opt.json_text(removal_dict(found, done=False)))
    if found:
        _may_remove(yes=yes)
    shown = {item.paths[0].name for item in found}
    with held(folder) as opened:  # once more: a run may have taken one while the user read the list
        gone = [item for item in removable(opened, keep, used_images()) if item.paths[0].name in shown]
        for path in (path for item in gone for path in item.paths):
            try:
                remove(path)
            except OSError as error:
                raise UserError(f"cannot remove {path.name}: {error.strerror}", where=str(folder)) from None
    if as_json:
        typer.echo(opt.json_text(removal_dict(gone, done=True)))
    elif found:
        typer.echo(removal(gone, done=True))
