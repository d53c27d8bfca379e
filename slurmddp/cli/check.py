"""check: pitfalls in batch scripts, found before they wait in the queue."""

from pathlib import Path
from typing import Annotated

import typer

from slurmddp.cli import options as opt
from slurmddp.cli.help import App


def register(app: App) -> None:
    """Put the command on the app."""
    app.add("Jobs", check, example="slurmddp check --script train.sbatch")


def check(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Batch scripts to check")],
    script: Annotated[bool, typer.Option("--script", help="The files are batch scripts for sbatch")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 for warnings, too")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout")] = False,
) -> None:
    """Find what will not work, or is fragile, in batch scripts for multi-node PyTorch. Needs no Slurm. Exit codes: 0
    no errors, 1 errors found, 2 a file cannot be read."""
    from slurmddp.check.finding import check_script
    from slurmddp.check.script import read
    from slurmddp.errors import UserError
    from slurmddp.report.check import as_dict, lines

    if not script:
        raise UserError(
            "check reads batch scripts only", todo="add --script, or check a job file with: slurmddp plan JOB.yaml"
        )
    scripts = [read(path) for path in files]
    found = [finding for each in scripts for finding in check_script(each)]
    if as_json:
        typer.echo(opt.json_text(as_dict(scripts, found)))
    else:
        for line in lines(scripts, found):
            typer.echo(line)
    fails = ("error", "warning") if strict else ("error",)
    if any(each.severity in fails for each in found):
        raise typer.Exit(1)
