"""du, clean: what runs take on disk."""

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from slurmddp.cli import options as opt
from slurmddp.cli.follow import Json
from slurmddp.cli.help import App
from slurmddp.styled import labelled

if TYPE_CHECKING:
    from slurmddp.runs.layout import RunFolder

Runs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RUN", help="Run ids, job ids, run folders, or last  [default: all]", autocompletion=opt.run_names
    ),
]


def register(app: App) -> None:
    """Put the group's commands on the app."""
    app.add("Runs", du, example="slurmddp du")
    app.add("Runs", clean, example="slurmddp clean --older-than 30d --state failed")


def _folders(runs: list[str] | None) -> "list[RunFolder]":
    from slurmddp.launch.find import find_run

    return [find_run(text, os.environ) for text in runs or ()]


def du(runs: Runs = None, as_json: Json = False) -> None:
    """List the disk space of runs, the largest first. Images are not counted."""
    from slurmddp.launch.find import known_runs
    from slurmddp.report.usage import as_dict, biggest_first, table
    from slurmddp.runs.usage import usage

    folders = _folders(runs)
    if not runs:
        folders = [entry.folder for entry in known_runs(os.environ)]
    found = biggest_first(
        usage(folder, lambda error: opt.say(labelled("warning", f"{error.filename}: {error.strerror}")))
        for folder in folders
    )
    typer.echo(opt.json_text([as_dict(item) for item in found]) if as_json else table(found))


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
        typer.Option(min=1, metavar="N", help="Remove only checkpoints; keep the N newest good ones of each run"),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask")] = False,
    as_json: Json = False,
) -> None:
    """Remove run folders, or old checkpoints, of runs that are over. Shows them and asks first.

    Active runs stay, and runs that a newer run resumes from.
    """
    from slurmddp.errors import UserError
    from slurmddp.launch.clean import Wanted, carry_out, plan
    from slurmddp.report.checkpoints import checked
    from slurmddp.report.runs import checked_states, moment
    from slurmddp.report.usage import clean_dict, clean_lines, removed_line
    from slurmddp.runs.pruning import Removal

    if not (runs or older_than or state):
        raise UserError("name runs to clean, or choose them", todo="for example --older-than 30d, or --state failed")
    before = moment("--older-than", older_than).timestamp() if older_than else None
    wanted = Wanted(_folders(runs), before, checked_states(state or ()), keep)
    planned, skipped = plan(wanted, os.environ, lambda item: checked(item, opt.say), opt.say)
    if not as_json:
        typer.echo("\n".join(clean_lines(planned, skipped)))
    asks = bool(planned) and not yes
    if asks and not sys.stdin.isatty():
        if as_json:
            typer.echo(opt.json_text(clean_dict(planned, skipped, done=False)))
        raise UserError(
            "nothing was removed: slurmddp cannot ask you without a terminal", todo="add --yes to remove all of this"
        )
    if asks:
        typer.confirm("Remove all of this?", abort=True, err=True)
    gone: list[Removal] = []
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
