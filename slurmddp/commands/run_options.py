"""The RUN of a command line."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Annotated

import typer

from slurmddp.alerts.spool import deliver_all
from slurmddp.commands import options as opt
from slurmddp.errors import UserError
from slurmddp.run import index
from slurmddp.run.layout import RunFolder

Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Run id (or its first characters), job id, run folder, or last (of this folder)",
        autocompletion=opt.run_names,
    ),
]
#: Which run is meant where none is named.
LAST = "last"
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask if `last` is a run of another folder")]


def confirm(run: str, folder: RunFolder, action: str, *, yes: bool) -> None:
    """Name the run before something is done to it; ask if `last` means one that was not submitted from this folder.

    Raises UserError where nobody can be asked, or the answer is no.
    """
    opt.say(f"run     {folder.id}\nfolder  {folder.path}")
    if run != LAST or yes or index.is_here(folder):
        return
    todo = f"slurmddp {action} {folder.id}, or add --yes"
    message = f"the last run was submitted from another folder: {folder.id}"
    if not sys.stdin.isatty():
        raise UserError(message, where="last", todo=todo)
    if not typer.confirm(f"It was submitted from another folder: {action} it?", err=True):
        raise UserError(f"nothing was done: {message}", todo=todo)


def send_waiting(folders: Iterable[RunFolder]) -> None:
    """Send delayed alerts, in two seconds at most, and say so: other commands do this on their way."""
    done = deliver_all(folders)
    if done.sent:
        opt.say(f"note: sent {done.sent} delayed alert{'s' if done.sent > 1 else ''}")
