"""submit: check the job, write its run folder and hand it to Slurm; or show what that would do; or a plain script."""

import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from slurmddp.alerts import secrets
from slurmddp.assets import package_folder
from slurmddp.cluster.client import Slurm
from slurmddp.commands import options as opt
from slurmddp.commands.terminal import Progress, write_exactly, write_new
from slurmddp.errors import UserError, each_once, together
from slurmddp.job.plan.model import Plan
from slurmddp.job.resolve import Request
from slurmddp.job.sensitive import refuse_values
from slurmddp.job.types import slurm_time
from slurmddp.launch.avoid import avoid
from slurmddp.launch.prepare import Prepared, prepare, prepare_or_refuse
from slurmddp.launch.problems import problems, refusals, unknown_here
from slurmddp.launch.submit import command_line, job_warnings
from slurmddp.launch.submit import submit as submit_now
from slurmddp.launch.workdir import files_before
from slurmddp.launch.write import run_files, survey_project
from slurmddp.render.plain import missing, plain_script
from slurmddp.report.plan import cost_line, nodes_text, plan_facts, program_text, workdir_text
from slurmddp.run import snapshot
from slurmddp.run.layout import RunFolder
from slurmddp.styled import exact, join, labelled

#: Stands for the id of the run, which only a submission makes.
RUN_ID = "RUN_ID"


class DryRun(NamedTuple):
    """What a submission would come to.

    command:    the words that would hand the job over.
    scripts:    name -> text of what is rendered for this job: job.sh, node.sh, and payloads/NAME of each alert target.
    machinery:  path in the run folder -> text of the shell functions that the scripts source.
    code_hash:  as manifest.json would have it; None where the project cannot be copied.
    refusals:   why `submit` would refuse the job.
    unchecked:  what only a login node of the cluster can tell; this machine has no sbatch.
    """

    prepared: Prepared
    folder: RunFolder
    command: tuple[str, ...]
    scripts: dict[str, str]
    machinery: dict[str, str]
    code_hash: str | None
    warnings: tuple[str, ...]
    refusals: list[UserError]
    unchecked: list[UserError]

    def as_dict(self) -> dict[str, Any]:
        """Return the dry run for --json; docs/files.md has the keys."""
        plan = self.prepared.plan
        return {
            **plan_facts(plan),
            "run_folder": str(self.folder.path),
            "command": list(self.command),
            "scripts": self.scripts,
            "machinery": {
                "path": str(self.folder.code_archive),
                "source": str(package_folder() / "shell"),
                "code_hash": self.code_hash,
                "files": self.machinery,
            },
            "warnings": [*(note.text for note in plan.notes), *self.warnings],
            "unchecked": [str(error) for error in self.unchecked],
            "refusal": str(together(self.refusals)) if self.refusals else None,
        }

    def summary(self) -> str:
        """Return what the job is, where it would write, and what it would run."""
        plan = self.prepared.plan
        rows = [
            ("site", f"{plan.site.name} ({self.prepared.resolved.site_from})"),
            ("nodes", nodes_text(plan)),
            ("ranks", _ranks(plan)),
            ("batch", _batch(plan)),
            ("time", _time(plan)),
            ("image", plan.container.image or f"none; {plan.container.python} of the nodes"),
            ("program", program_text(plan)),
            ("directory", workdir_text(plan)),
            ("cost", cost_line(plan).removeprefix("cost: ")),
            ("writes", f"{self.folder.path} (RUN_ID: {plan.job.name}-DATE-TIME-XXXX)"),
            ("runs", exact(shlex.join(self.command))),
        ]
        if plan.alerts:
            rows.append(("alerts", ", ".join(target.name for target in plan.alerts.targets)))
        return _table(rows)


def _table(rows: list[tuple[str, str]]) -> str:
    return join("\n", (f"{name:<10}" + text for name, text in rows))


def dry_run_of(prepared: Prepared, refused: UserError | None = None) -> DryRun:
    """Check what `submit` checks, and collect what it would write.

    refused: why the job could not even be prepared as `submit` prepares it.
    Raises UserError where nothing may be shown: a secret stands in one of the files.
    """
    plan = prepared.plan
    files = run_files(prepared, RUN_ID)
    errors = each_once([*(refused.parts if refused else ()), *refusals(prepared, program=refused is None)])
    unchecked = unknown_here(plan, errors)
    errors = [error for error in errors if error not in unchecked]
    variables = {name: os.environ[name] for name in plan.job.environment_from if os.environ.get(name)}
    try:
        refuse_values(variables, files)
    except UserError as error:
        raise together([*errors, error]) from None
    avoided = avoid(prepared)
    warnings = [*job_warnings(prepared, files_before(prepared)), *avoided.warnings]
    code_hash = None
    try:
        project = survey_project(plan)
        code_hash = snapshot.hash_of(project)
        warnings += project.warnings if project else ()
    except UserError as error:
        if not errors:  # one of them may be the same: a project that is not there
            errors.append(error)
    folder = RunFolder(Path(plan.runs_root) / RUN_ID)
    return DryRun(
        prepared,
        folder,
        command_line(plan, folder, avoided.options),
        {name: text for name, text in files.items() if name in ("job.sh", "node.sh") or name.startswith("payloads/")},
        {name: path.read_text("utf-8") for name, path in snapshot.machinery().items()},
        code_hash,
        tuple(warnings),
        errors,
        unchecked,
    )


def _ranks(plan: Plan) -> str:
    nodes, layout = plan.nodes, plan.layout
    if nodes.world is None:
        each = "GPU" if layout.gpus_per_node else f"{layout.threads_per_rank} cores"
        return f"auto: each node starts one per {each}"
    return f"{nodes.world} = {nodes.ranks_per_node} per node x {nodes.max}"


def _batch(plan: Plan) -> str:
    batch = plan.batch
    if batch is None:
        return "the script's own"
    if batch.accumulation is None or plan.nodes.world is None:
        return f"{batch.total}, micro batch up to {batch.micro}; accumulation follows from the ranks"
    tensor = plan.job.parallel.tensor
    takers = f"{plan.nodes.world // tensor} ({'tensor groups' if tensor > 1 else 'ranks'})"
    product = f"{batch.micro} (micro batch) x {batch.accumulation} (accumulation) x {takers}"
    return f"{batch.total} = {product}" if batch.even else f"{batch.total}, uneven, of at most {product}"


def _time(plan: Plan) -> str:
    if not plan.site.queues:
        return "no limit"
    limit = "the partition's default" if plan.job.resources.time is None else slurm_time(plan.job.resources.time)
    return limit + (f"; ranks save {plan.stop_lead} s before" if plan.stop_lead else "")


def show_dry_run(prepared: Prepared, refused: UserError | None = None, *, as_json: bool, full: bool = False) -> None:
    """Show what `submit` would write and run, or say why it would refuse the job."""
    from slurmddp.commands.script_facts import script_dict, sentence_lines  # here: only a dry run takes the time

    shown = dry_run_of(prepared, refused)
    if as_json:
        typer.echo(opt.json_text(shown.as_dict()))
    elif not shown.refusals:  # a mistake must not stand below a hundred lines of scripts
        _show_scripts(shown, full=full)
    opt.show_notes(prepared, known=shown.refusals)
    for warning in shown.warnings:
        opt.say(labelled("warning", warning))
    if not as_json and not shown.refusals and (script := script_dict(prepared)):
        for line in sentence_lines(script):
            opt.say(line)
    if shown.refusals:
        raise together(shown.refusals)
    if shown.unchecked:
        errors = "".join(f"\n  {error.where + ': ' if error.where else ''}{error.what}" for error in shown.unchecked)
        opt.say(f"not checked, because this machine has no sbatch; `submit` checks it on a login node:{errors}")


def _show_scripts(shown: DryRun, *, full: bool) -> None:
    """Print the summary and the scripts. On a terminal the summary stands last, where the reader's eyes are."""
    scripts = {name: text for name, text in shown.scripts.items() if full or not name.startswith("payloads/")}
    rows = [
        ("functions", f"{shown.folder.code_archive}, from {package_folder() / 'shell'}"),
        ("code hash", shown.code_hash or "unknown: the project cannot be copied"),
    ]
    if not full:
        payloads = " and the payloads of alerts" if shown.prepared.plan.alerts else ""
        rows.append(("more", f"--full prints the functions{payloads}"))
    summary_last = sys.stdout.isatty()
    if not summary_last:
        typer.echo(f"{shown.summary()}\n")
    for name, text in {**scripts, **(shown.machinery if full else {})}.items():
        typer.echo(f"=== {name}")
        write_exactly(text.encode("utf-8", errors="surrogateescape"))
        typer.echo()
    if summary_last:
        typer.echo(shown.summary())
    typer.echo(_table(rows))


def _submit_plain(request: Request, *, dry_run: bool, as_json: bool) -> None:
    """Write the plain script to this folder and submit it, or print it; stderr has what it lacks.

    Raises UserError, ExternalError.
    """
    prepared, refused = prepare_or_refuse(request.adding(*((key, value, "--plain") for key, value in opt.PLAIN)))
    plan = prepared.plan
    errors = each_once([*(refused.parts if refused else ()), *problems(prepared, program=refused is None)])
    unchecked = unknown_here(plan, errors) if dry_run else []
    if errors := [error for error in errors if error not in unchecked]:
        raise together(errors)
    path = Path(f"{plan.job.name}.sbatch")
    text = plain_script(plan, path.name)
    job_id, log, next_ = None, None, [f"sbatch {path}"]
    if not dry_run:
        secrets.take_variables(plan.job.environment_from, dict(os.environ))  # sbatch hands them on: only looked at
        if not path.is_file() or path.read_bytes() != text.encode("utf-8", errors="surrogateescape"):
            todo = f"`sbatch {path}` submits it as it is; remove it, or choose another name with --name"
            write_new(path, text, todo=todo)
        job_id = str(Slurm().submit(Slurm.sbatch_command((), path.name, ()), Path.cwd()))
        number = job_id.partition(";")[0]
        log = str(Path.cwd() / f"{plan.job.name}-{number}.log")
        next_ = [f"squeue --job={number}", f"scancel {number}", f"slurmddp doctor {log}"]
    lacks = missing(plan)
    opt.show_notes(prepared)
    if as_json:
        facts = {"file": path.name, "script": text, "missing": list(lacks), "job_id": job_id, "log": log, "next": next_}
        typer.echo(opt.json_text(facts))
    elif dry_run:
        write_exactly(text.encode("utf-8", errors="surrogateescape"))
    else:
        typer.echo(f"script  {path.name}\njob     {job_id}\nlog     {log}")
    opt.say("The plain script lacks what the supervised job has (submit without --plain):")
    for line in lacks:
        opt.say(f"  - {line}")


def hand_over(prepared: Prepared, *, as_json: bool, repeats: str | None = None) -> None:
    """Submit the job, and print its run. repeats: the run that it repeats."""
    opt.show_notes(prepared)

    with Progress() as progress:
        submission = submit_now(prepared, progress.tell)
    for warning in submission.warnings:
        opt.say(labelled("warning", warning))
    opt.say(cost_line(prepared.plan))
    if prepared.plan.program.own:
        opt.say(f"in      {workdir_text(prepared.plan)}")
    if submission.code:
        opt.say(f"code    {submission.code}")
    if repeats or prepared.resumed.runs:
        opt.say(f"from    {f'{repeats}, step 0' if repeats else prepared.resumed.start()}")
    if as_json:
        typer.echo(opt.json_text(submission.as_dict()))
        return
    opt.say(f"site    {submission.site} ({prepared.resolved.site_from})")
    typer.echo(f"run     {submission.run_id}")
    typer.echo(f"job     {submission.job_id}")
    typer.echo(f"log     {submission.log}")
    opt.say(f"to follow: slurmddp logs {submission.run_id} -f")


DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Check the job and print its summary and scripts; write and submit nothing")
]


@opt.job_command()
def submit(
    request: Request,
    resume: opt.Resume = None,
    dry_run: DryRunOption = False,
    full: bool = opt.flag("--full", "With --dry-run: also print all shell functions"),
    plain: bool = opt.flag(
        "--plain", "Submit a short ordinary sbatch script instead, NAME.sbatch, which runs without slurmddp"
    ),
    as_json: opt.Json = False,
    explain: opt.Explain = None,
) -> None:
    """Check the job, write its run folder, and submit it with sbatch."""
    opt.needs((full, "--full", dry_run, "--dry-run"))
    request = replace(request, resume=resume)
    if plain:
        for option, value in (("--resume", resume), ("--full", full), ("--explain", explain)):
            opt.one_of({"--plain": plain, option: value}, todo="remove one of them")
        _submit_plain(request, dry_run=dry_run, as_json=as_json)
    elif explain:
        opt.show_explanation(prepare(request, strict=False), explain)
    elif dry_run:
        show_dry_run(*prepare_or_refuse(request), as_json=as_json, full=full)
    else:
        hand_over(prepare(request), as_json=as_json)
