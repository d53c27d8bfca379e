"""doctor: why a run failed, or what logs of any other run say."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slurmddp.commands import options as opt
from slurmddp.commands.help import App

if TYPE_CHECKING:
    from slurmddp.doctor.diagnose import Examination
    from slurmddp.run.layout import RunFolder


def register(app: App) -> None:
    """Put the command on the app."""
    app.add("Runs", doctor, example="slurmddp doctor slurm-1234.out")


def doctor(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN|FILE",
            help="Run, log files, folders of logs, or - for standard input (default: last)",
            autocompletion=opt.run_names,
        ),
    ] = None,
    as_json: opt.Json = False,
) -> None:
    """Find the root cause of a failure in the logs of a run, also of one that slurmddp did not start. Exit codes: 0 no
    failure found, 1 failure found, 2 a file or run cannot be read, or a part was not examined and
    the rest has no failure."""
    from slurmddp.report.doctor import as_dict, lines
    from slurmddp.run.next_commands import next_commands

    examined, runs = examine(targets or ["last"])
    found = examined.diagnose()
    if as_json:
        next_ = [each for run in runs for each in next_commands(run.id, "failed")]
        others = [each for each in next_ if not each.startswith("slurmddp doctor ")]
        looks = [f"slurmddp status {run.id}" for run in runs]  # the logs alone do not say whether it goes on
        typer.echo(opt.json_text({**as_dict(found), "next": looks if found.root is None else others}))
    else:
        for line in lines(found):
            typer.echo(line)
    if found.root is not None:
        raise typer.Exit(1)
    if found.sure == "unknown":
        raise typer.Exit(2)


def examine(targets: list[str]) -> "tuple[Examination, list[RunFolder]]":
    """Read runs and logs, and return which runs. Raises UserError where nothing could be read."""
    from slurmddp.doctor.diagnose import Examination
    from slurmddp.errors import UserError
    from slurmddp.visible import one_line

    examined = Examination()
    runs = [run for target in targets if (run := _read(examined, target))]
    if not examined.files:
        note, _, todo = one_line(examined.notes[0]).partition(" -> ")
        raise UserError(note, todo=todo)
    return examined, runs


def _read(examined: "Examination", target: str) -> "RunFolder | None":
    """Return the run, if the target is one."""
    from slurmddp.doctor.sources import is_done, read_path, read_run, read_stream, start_notes, survived_failures
    from slurmddp.launch.find import find_run
    from slurmddp.run.snapshot_filter import is_run_folder

    path = Path(target)
    if target == "-":
        read_stream(examined, sys.stdin.buffer)
    elif path.is_file() or (path.is_dir() and not is_run_folder(path)):
        read_path(examined, path)
    elif os.sep in target and not path.is_dir():
        read_path(examined, path)  # says why it cannot be read
    else:
        folder = find_run(target, os.environ)
        if is_done(folder):
            examined.files.append(str(folder.path))
            examined.notes.append(f"run {folder.id} finished its work")
            examined.notes += survived_failures(folder)
        else:
            read_run(examined, folder)
        examined.notes += start_notes(folder)
        return folder
    return None
