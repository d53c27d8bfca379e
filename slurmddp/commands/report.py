"""report: one run, or two, as an HTML file or as JSON."""

import os
from pathlib import Path
from typing import Annotated

import typer

from slurmddp.commands import options as opt
from slurmddp.commands.follow import LAST, Json, Run
from slurmddp.commands.help import App


def register(app: App) -> None:
    """Put the command on the app."""
    app.add("Runs", report, example="slurmddp report last -o report.html --compare gpt-20261120-090000-a1b2")


def report(
    run: Run = LAST,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="File to write, or a folder for RUN.html")
    ] = None,
    compare: Annotated[
        str | None, typer.Option(metavar="RUN2", help="Second run, to compare with", autocompletion=opt.run_names)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it exists")] = False,
    as_json: Json = False,
) -> None:
    """Write an HTML file about a run: curves, where its time went, faults, network, configuration."""
    from slurmddp.errors import UserError
    from slurmddp.launch.find import find_run

    folders = [find_run(name, os.environ) for name in (run, compare) if name is not None]
    if as_json:
        from slurmddp.report.report_json import report_dicts

        if output is not None:
            raise UserError("--json prints to stdout and takes no -o", todo="remove -o, and redirect: > FILE")
        typer.echo(opt.json_text(report_dicts(folders)))
        return
    from slurmddp.launch.new_file import write_new
    from slurmddp.report.page import report_html

    path = output or Path()
    if path.is_dir():
        path /= f"{folders[0].id}.html"
    write_new(path, report_html(folders), force=force, todo="choose another name with -o, or add --force")
    typer.echo(path)
