"""check: what will go wrong with a job, or with a batch script, found before it waits in the queue."""

from pathlib import Path
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
    fix: Annotated[
        bool, typer.Option("--fix", help="With --script: print the corrected script; findings go to stderr")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="With --fix: write it to a new file")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="With -o: replace FILE if it exists")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 for warnings, too")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout")] = False,
    resume: opt.Resume = None,
) -> None:
    """Check a job for what would make it fail. Submits nothing. Exit codes: 0 no errors, 1 errors found, 2 the
    job file has mistakes, or a file cannot be read."""
    from slurmddp.errors import UserError

    for given, option, met, needs in (
        (fix, "--fix", script, "--script"),
        (output, "-o", fix, "--fix"),
        (force, "--force", output, "-o"),
    ):
        if given and not met:
            todo = "slurmddp check --script train.sbatch --fix -o fixed.sbatch"
            raise UserError(f"{option} needs {needs}", todo=todo)
    if fix:
        severities = _fix_script(asked, output, force, as_json)
    else:
        severities = _check_scripts(asked, as_json) if script else _check_job(asked, resume, partitions, as_json)
    if severities & ({"error", "warning"} if strict else {"error"}):
        raise typer.Exit(1)


def _script_names(asked: opt.Asked) -> list[str]:
    from slurmddp.errors import UserError

    if asked.options:
        raise UserError(f"{asked.options[0][2]} needs a job file", todo="remove it, or remove --script")
    names = [*([asked.job] if asked.job else []), *asked.args]
    if not names:
        raise UserError("no batch script given", todo="slurmddp check --script train.sbatch")
    return names


def _fix_script(asked: opt.Asked, output: Path | None, force: bool, as_json: bool) -> set[str]:
    from slurmddp.check.fix import fix_script
    from slurmddp.check.script import read
    from slurmddp.cli.terminal import write_exactly
    from slurmddp.errors import UserError
    from slurmddp.launch.new_file import write_new
    from slurmddp.report.check import as_dict, fix_lines

    names = _script_names(asked)
    if len(names) > 1:
        raise UserError(f"--fix takes one script, not {len(names)}", todo="run it once per script")
    script = read(Path(names[0]), errors="surrogateescape")
    fixed = fix_script(script)
    if output:
        write_new(output, fixed.text, force=force, todo="choose another name, or add --force")
    if as_json:
        told = as_dict([script], fixed.left)
        done = {"fixed": [each.as_dict() for each in fixed.done], "stopped": fixed.stopped, "doubt": fixed.doubt}
        typer.echo(opt.json_text(told | done | {"script": fixed.text}))
    else:
        for line in fix_lines(script, fixed):
            opt.say(line)
        if not output:
            write_exactly(fixed.text.encode("utf-8", errors="surrogateescape"))
    return {each.severity for each in fixed.left}


def _check_scripts(asked: opt.Asked, as_json: bool) -> set[str]:
    from slurmddp.check.finding import check_script
    from slurmddp.check.script import read
    from slurmddp.report.check import as_dict, lines

    scripts = [read(Path(name)) for name in _script_names(asked)]
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
