"""submit, resume, rerun, run, init, import: from a job to its scripts and its run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slurmddp.api import look
from slurmddp.commands import options as opt
from slurmddp.commands.follow import LAST, Json, Run, Yes, confirm
from slurmddp.commands.help import App
from slurmddp.commands.terminal import Progress, write_exactly, write_line
from slurmddp.styled import labelled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slurmddp.errors import UserError
    from slurmddp.launch.dry_run import DryRun
    from slurmddp.launch.init import Made
    from slurmddp.launch.prepare import Prepared

DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Check the job and print its summary and scripts; write and submit nothing")
]


def register(app: App) -> None:
    """Put the group's commands on the app."""
    app.add("Jobs", init, example="slurmddp init job.yaml --site leonardo")
    app.add("Jobs", import_, name="import", example="slurmddp import train.sbatch -o job.yaml")
    app.add("Jobs", submit, example="slurmddp submit train.py --nodes 4 --image image.sif -- --lr 3e-4")
    app.add("Jobs", resume, example="slurmddp resume last --nodes 3")
    app.add("Jobs", rerun, example="slurmddp rerun last")
    app.add("Jobs", run, example="slurmddp run train.py --ranks 2")


@opt.job_command()
def submit(
    asked: opt.Asked,
    resume: opt.Resume = None,
    dry_run: DryRunOption = False,
    full: Annotated[bool, typer.Option("--full", help="With --dry-run: also print all shell functions")] = False,
    plain: Annotated[
        bool,
        typer.Option(
            "--plain", help="Submit a short ordinary sbatch script instead, NAME.sbatch, which runs without slurmddp"
        ),
    ] = False,
    as_json: Json = False,
    explain: opt.Explain = None,
) -> None:
    """Check the job, write its run folder, and submit it with sbatch."""
    from slurmddp.errors import UserError

    if full and not dry_run:
        raise UserError("--full needs --dry-run", todo="add --dry-run, or remove --full")
    if plain:
        refused = {"--resume": resume, "--full": full, "--explain": explain}
        if other := next((name for name, given in refused.items() if given), None):
            raise UserError(f"--plain and {other} cannot be combined", todo="remove one of them")
        _plain(asked, dry_run=dry_run, as_json=as_json)
        return
    if dry_run and not explain:
        _dry_run(asked, resume, as_json=as_json, full=full)
        return
    prepared = asked.prepare(strict=not explain, resume=resume)
    if explain:
        opt.show_explanation(prepared, explain)
        return
    _hand_over(prepared, as_json=as_json)


def _plain(asked: opt.Asked, *, dry_run: bool, as_json: bool) -> None:
    """Submit the plain script, or print it; stderr has what it lacks."""
    from slurmddp.launch.plain import plain_job

    options = [*asked.options, *((key, value, "--plain") for key, value in opt.PLAIN)]
    prepared, refused = asked._replace(options=options).prepare_or_refuse(None)
    found = plain_job(prepared, refused, submit=not dry_run)
    opt.show_notes(prepared)
    if as_json:
        typer.echo(opt.json_text(found.as_dict()))
    elif dry_run:
        write_exactly(found.script.encode("utf-8", errors="surrogateescape"))
    else:
        typer.echo(f"script  {found.file}\njob     {found.job_id}\nlog     {found.log}")
    opt.say("The plain script lacks what the supervised job has (submit without --plain):")
    for line in found.missing:
        opt.say(f"  - {line}")


def _hand_over(prepared: "Prepared", *, as_json: bool, repeats: str | None = None) -> None:
    """Submit the job, and print its run. repeats: the run that it repeats."""
    opt.show_notes(prepared)
    from slurmddp.launch.submit import submit as submit_now
    from slurmddp.report.cost import cost_line
    from slurmddp.report.plan import workdir_text
    from slurmddp.run.checkpoints import start_of

    with Progress() as progress:
        handed = submit_now(prepared, progress.tell)
    for warning in handed.warnings:
        opt.say(labelled("warning", warning))
    opt.say(cost_line(prepared.plan))
    if prepared.plan.program.own:
        opt.say(f"in      {workdir_text(prepared.plan)}")
    if handed.code:
        opt.say(f"code    {handed.code}")
    if repeats or prepared.resumed_from:
        opt.say(f"from    {f'{repeats}, step 0' if repeats else start_of(prepared.resumed_from)}")
    if as_json:
        typer.echo(opt.json_text(handed.as_dict()))
        return
    opt.say(f"site    {handed.site} ({prepared.resolved.site_from})")
    typer.echo(f"run     {handed.run_id}")
    typer.echo(f"job     {handed.job_id}")
    typer.echo(f"log     {handed.log}")
    opt.say(f"to follow: slurmddp logs {handed.run_id} -f")


@opt.job_command(without=("job", "args", "module"))
def resume(
    asked: opt.Asked, run: Run = LAST, dry_run: DryRunOption = False, yes: Yes = False, as_json: Json = False
) -> None:
    """Continue a run from its newest checkpoint, in a new run. The same as `submit --resume RUN`. A script of your own
    gets the checkpoint folders of the older runs in SLURMDDP_RESUME_FROM."""
    import os

    from slurmddp.launch.find import find_run

    if dry_run:
        _dry_run(asked, run, as_json=as_json, full=False)
        return
    confirm(run, find_run(run, os.environ), "resume", yes=yes)
    _hand_over(asked.prepare(strict=True, resume=run), as_json=as_json)


def rerun(
    run: Run = LAST,
    workdir: Annotated[
        str | None, typer.Option(metavar="submit|run|DIR", help="Where your script runs, if not where it ran before")
    ] = None,
    dry_run: DryRunOption = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Submit a run again from its start, with the code, image and configuration that it had."""
    import os

    from slurmddp.launch.find import find_own_run
    from slurmddp.launch.rerun import prepare_again

    todo = "read its job file, then submit it: slurmddp submit RUN_FOLDER/job.yaml"
    folder = find_own_run(run, os.environ, to="run its code with your account", todo=todo)
    if not dry_run:
        confirm(run, folder, "rerun", yes=yes)
    prepared = prepare_again(folder, os.environ, opt.say, workdir=workdir)
    if dry_run:
        _show_what_submit_does(prepared, as_json=as_json)
    else:
        _hand_over(prepared, as_json=as_json, repeats=folder.id)


def _dry_run(asked: opt.Asked, resume: str | None, *, as_json: bool, full: bool) -> None:
    """Show what `submit` would write and run, or say why it would refuse the job."""
    prepared, refused = asked.prepare_or_refuse(resume)
    _show_what_submit_does(prepared, refused, as_json=as_json, full=full)


def _show_what_submit_does(
    prepared: "Prepared", refused: "UserError | None" = None, *, as_json: bool, full: bool = False
) -> None:
    from slurmddp.errors import together
    from slurmddp.launch.dry_run import dry_run

    found = dry_run(prepared, refused)
    if as_json:
        typer.echo(opt.json_text(found.as_dict(prepared)))
    elif not found.refusals:  # a mistake must not stand below a hundred lines of scripts
        _show_dry_run(prepared, found, full=full)
    opt.show_notes(prepared, known=found.refusals)
    for warning in found.warnings:
        opt.say(labelled("warning", warning))
    if found.refusals:
        raise together(found.refusals)
    if found.unchecked:
        what = "".join(f"\n  {error.where + ': ' if error.where else ''}{error.what}" for error in found.unchecked)
        opt.say(f"not checked, because this machine has no sbatch; `submit` checks it on a login node:{what}")


def _show_dry_run(prepared: "Prepared", found: "DryRun", *, full: bool) -> None:
    from slurmddp.report.dry_run import machinery_lines, summary_lines

    def show(name: str, text: str) -> None:
        typer.echo(f"\n=== {name}")
        write_exactly(text.encode("utf-8", errors="surrogateescape"))

    for line in summary_lines(prepared.plan, prepared.resolved, found.folder, found.command):
        typer.echo(line)
    for name, text in found.scripts.items():
        if full or not name.startswith("payloads/"):
            show(name, text)
    if full:
        for name, text in found.machinery.items():
            show(name, text)
    typer.echo("")
    for line in machinery_lines(prepared.plan, found.folder, found.machinery_source, found.code_hash, full=full):
        typer.echo(line)


@opt.job_command(without=opt.OF_SUBMISSION)
def run(
    asked: opt.Asked,
    resume: opt.Resume = None,
    ranks: Annotated[
        int | None, typer.Option(metavar="N", help="Ranks per node  [default: one per GPU]", min=1, max=1024)
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Do not show the output of the ranks")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="At the end, print the status as JSON on stdout; implies --quiet")
    ] = False,
) -> None:
    """Run a job now, inside an allocation (salloc, a batch job) or on this machine. Ctrl-C cancels it."""
    if ranks is not None:
        asked = asked._replace(options=[*asked.options, ("resources.ranks_per_node", str(ranks), "--ranks")])
    prepared = asked.prepare(strict=True, resume=resume, inside=True)
    opt.show_notes(prepared)
    from slurmddp.launch.foreground import run_foreground

    try:
        with Progress() as progress:
            code, folder = run_foreground(prepared, None if quiet or as_json else write_line, opt.say, progress.tell)
        if as_json:
            typer.echo(opt.json_text({**look(folder).as_dict(), "exit_code": code}))
    except BrokenPipeError:
        opt.drop_output()
        code = 1  # cancelled, as `status` reports it
    raise typer.Exit(code)


def init(
    path: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="File to write; it must not exist yet")] = Path(
        "job.yaml"
    ),
    site: opt.Site = None,
    script: Annotated[str | None, typer.Option(metavar="FILE", help="Train your own script")] = None,
    task: Annotated[str | None, typer.Option(metavar="lm|images", help="Train a bundled task")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing: take the likeliest of what was found")] = False,
    as_json: Json = False,
) -> None:
    """Write a commented job file from what is found here: the cluster, its partitions and GPUs, your training script,
    an image or the active Python environment. Asks at most three questions, on a terminal only. If no site profile
    fits the cluster, one is drafted (site init)."""
    import sys

    from slurmddp.launch.init import write_job_file

    asks = not yes and not as_json and sys.stdin.isatty() and sys.stderr.isatty()
    written = write_job_file(path, site, task, script, _ask if asks else None)
    typer.echo(opt.json_text(written.as_dict()) if as_json else path)
    found = written.choices
    _say_site(written.made, "init")
    for name, value in (
        ("script", found.script),
        ("image", found.image),
        ("python", found.environment and f"{found.environment.folder} ({found.environment.source})"),
    ):
        if value:
            opt.say(f"{name:<8}{value}")
    for note in written.notes:
        opt.say(labelled("note", note))
    opt.say(f"next    {written.next[0]}")


def _ask(question: str, answers: "Sequence[str]") -> str:
    """Ask on the terminal; Enter takes the first answer."""
    if len(answers) < 2:
        return str(typer.prompt(question, default=answers[0] if answers else "", err=True)).strip()
    for number, answer in enumerate(answers, 1):
        opt.say(f"  {number}  {answer}")
    while True:
        choice: int = typer.prompt(question, default=1, type=int, err=True)
        if 1 <= choice <= len(answers):
            return str(answers[choice - 1])


def _say_site(made: "Made", command: str) -> None:
    opt.say(f"site    {made.site} ({made.why})")
    if made.guessed:
        opt.say(f"`slurmddp site` lists all sites; `slurmddp {command} --site NAME` selects another one")


def import_(
    script: Annotated[Path, typer.Argument(metavar="FILE.sbatch", help="Batch script that slurmddp did not write")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="JOB.yaml", help="File to write; default: stdout")
    ] = None,
    site: opt.Site = None,
    as_json: Json = False,
) -> None:
    """Write the job file of a batch script. Comments in it list what was not imported. Exit codes: 0 the job file
    starts what the script starts, 1 something is missing in it, 2 slurmddp cannot run what is in the file."""
    from slurmddp.launch.new_file import write_new
    from slurmddp.scripts.imports.write import import_script

    found = import_script(script, site, str(output or "job.yaml"))
    if output:
        write_new(output, found.text)
    if as_json:
        told = {"file": output and str(output), "job": found.text, "valid": found.valid, "not_imported": found.lost}
        typer.echo(opt.json_text({**told, "comments": found.left, "problems": [str(each) for each in found.problems]}))
    elif output:
        typer.echo(output)
    else:
        write_exactly(found.text.encode("utf-8", errors="replace"))
    _say_site(found.made, "import")
    if found.left:
        count = f"{found.left} line or option is" if found.left == 1 else f"{found.left} lines or options are"
        opt.say(f"skipped {count} not imported: comments at the top of the job file list them with the reasons")
    for line in found.lost:
        opt.say(f"not imported: {line}")
    for problem in found.problems:
        opt.say(f"{'to do  ' if found.valid else 'missing'} {problem}")
    if found.valid and found.problems:
        opt.say("The job file is valid, but `submit` rejects it until you do this in the shell that submits.")
    opt.say(f"next    slurmddp check {output or 'job.yaml'}")
    if found.lost:
        opt.say("The job file starts another job than the script: do these lines by hand before you submit it.")
    if found.lost or not found.valid:
        raise typer.Exit(1)
