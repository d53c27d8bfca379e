"""check: what will go wrong with a job, or with a batch script, found before it waits in the queue."""

from typing import Annotated

import typer

from slurmddp.cli import options as opt
from slurmddp.cli.help import App


def register(app: App) -> None:
    """Put the command on the app."""
    app.add("Jobs", check, example="slurmddp check job.yaml")


@opt.job_command()
def check(
    asked: opt.Asked,
    script: Annotated[
        bool, typer.Option("--script", help="Check FILE... instead: batch scripts that slurmddp did not write")
    ] = False,
    partitions: Annotated[
        bool, typer.Option("--partitions", help="Also rank the partitions by when they would start the job")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 for warnings, too")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout")] = False,
    resume: opt.Resume = None,
) -> None:
    """Find what will go wrong with a job before it waits in the queue. Submits nothing. Exit codes: 0 no errors, 1
    errors found, 2 a file cannot be read."""
    severities = _check_scripts(asked, as_json) if script else _check_job(asked, resume, partitions, as_json)
    if severities & ({"error", "warning"} if strict else {"error"}):
        raise typer.Exit(1)


def _check_scripts(asked: opt.Asked, as_json: bool) -> set[str]:
    from pathlib import Path

    from slurmddp.check.finding import check_script
    from slurmddp.check.script import read
    from slurmddp.errors import UserError
    from slurmddp.report.check import as_dict, lines

    if asked.options:
        raise UserError(f"{asked.options[0][2]} needs a job file", todo="remove it, or remove --script")
    names = [*([asked.job] if asked.job else []), *asked.args]
    if not names:
        raise UserError("no batch script given", todo="slurmddp check --script train.sbatch")
    scripts = [read(Path(name)) for name in names]
    found = [finding for each in scripts for finding in check_script(each)]
    if as_json:
        typer.echo(opt.json_text(as_dict(scripts, found)))
    else:
        for line in lines(scripts, found):
            typer.echo(line)
    return {each.severity for each in found}


def _check_job(asked: opt.Asked, resume: str | None, partitions: bool, as_json: bool) -> set[str]:
    from slurmddp.errors import UserError
    from slurmddp.launch.job_check.answer import answer
    from slurmddp.report.check_job import lines

    if asked.job and asked.job.endswith((".sbatch", ".slurm", ".sh")):
        raise UserError("is a batch script, not a job file", where=asked.job, todo="add --script")
    found = answer(asked.prepare(strict=True, resume=resume), partitions=partitions)
    if as_json:
        typer.echo(opt.json_text(found.as_dict()))
    else:
        for line in lines(found.as_dict()):
            typer.echo(line)
    return {each.severity for each in found.findings}
