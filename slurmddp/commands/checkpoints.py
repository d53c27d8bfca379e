"""checkpoint list, verify, prune, export: what a run has saved."""

import os
from pathlib import Path
from typing import Annotated

import typer

from slurmddp.commands import options as opt
from slurmddp.commands.follow import LAST, Json, Run
from slurmddp.commands.help import App

Step = Annotated[int | None, typer.Option(min=0, metavar="N", help="Verify only the checkpoint of this step")]


def register(app: App) -> None:
    """Put the group's commands on the app."""
    group = App(help="List, verify, prune and export the checkpoints of a run")
    group.add(None, list_checkpoints, name="list", example="slurmddp checkpoint list last")
    group.add(None, verify, example="slurmddp checkpoint verify last")
    group.add(None, prune, example="slurmddp checkpoint prune last --keep 3 --dry-run")
    group.add(None, export, example="slurmddp checkpoint export last -o model.safetensors")
    app.add_typer(group, name="checkpoint", rich_help_panel="Runs")


def list_checkpoints(run: Run = LAST, as_json: Json = False) -> None:
    """List the checkpoints of a run and of the runs it resumed from, and mark the one to resume from."""
    from slurmddp.launch.find import find_run
    from slurmddp.report.checkpoints import as_dict, table
    from slurmddp.run.checkpoints import leftovers, survey

    folder = find_run(run, os.environ)
    found = survey(folder)
    if as_json:
        typer.echo(opt.json_text([as_dict(item, found) for item in found]))
    else:
        typer.echo(table(folder, found, leftovers(folder)))


def verify(run: Run = LAST, step: Step = None, as_json: Json = False) -> None:
    """Check every file of a run's checkpoints against its hash. Exit code: 0 all good, 1 some damaged."""
    from slurmddp.launch.find import find_run
    from slurmddp.report.checkpoints import as_dict, verdict, verified

    found = []
    for item in verified(find_run(run, os.environ), step, opt.say):
        found.append(item)
        if not as_json:
            typer.echo(verdict(item))
    if as_json:
        typer.echo(opt.json_text([as_dict(item, found) for item in found]))
    raise typer.Exit(int(any(item.fault is not None for item in found)))


def prune(
    keep: Annotated[int, typer.Option(min=1, metavar="N", help="Keep the N newest good checkpoints")],
    run: Run = LAST,
    keep_every: Annotated[
        int | None, typer.Option(min=1, metavar="M", help="Also keep checkpoints whose step is a multiple of M")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed; remove nothing")] = False,
    force: Annotated[bool, typer.Option("--force", help="Prune even while the run is pending or running")] = False,
    as_json: Json = False,
) -> None:
    """Remove old, unfinished and damaged checkpoints of a run, but never the newest good one."""
    from slurmddp.launch.find import find_own_run
    from slurmddp.report import checkpoints as report
    from slurmddp.run import pruning

    folder = find_own_run(run, os.environ, to="prune its checkpoints")
    if not force:
        report.refuse_while_going(folder)
    planned = pruning.plan(
        folder, keep=keep, keep_every=keep_every, running=force, checked=lambda item: report.checked(item, opt.say)
    )
    for item in planned.going if dry_run else pruning.prune(folder, planned):
        if not as_json:
            typer.echo(report.removal(item, done=not dry_run))
    if as_json:
        typer.echo(opt.json_text(report.pruning_dict(planned, done=not dry_run)))
    else:
        typer.echo(report.pruning_end(planned, done=not dry_run))


def export(
    run: Run = LAST,
    step: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Step of the checkpoint  [default: the newest good one]")
    ] = None,
    format_: Annotated[
        str | None,
        typer.Option(
            "--format", metavar="pt|safetensors", help="File format  [default: from the suffix of FILE, else pt]"
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="File to write  [default: model.pt or model.safetensors]"),
    ] = None,
    what: Annotated[
        str,
        typer.Option(metavar="model|all", help="Export the model's weights, or all tensors of the checkpoint"),
    ] = "model",
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it exists")] = False,
    trust: Annotated[
        bool, typer.Option("--trust", help="Run another user's image, setup lines and code with your account")
    ] = False,
    as_json: Json = False,
) -> None:
    """Export the weights of a checkpoint to one file, with the PyTorch of the run's image or environment."""
    from slurmddp.launch.export import Wanted
    from slurmddp.launch.export import export as export_now
    from slurmddp.launch.find import find_run

    folder = find_run(run, os.environ)
    written = export_now(folder, Wanted(step, format_, output, what, force, trust), Path.cwd(), os.environ, opt.say)
    typer.echo(opt.json_text({"run_id": folder.id, "file": str(written)}) if as_json else written)
