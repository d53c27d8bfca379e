"""What `submit --dry-run` shows: what a submission would write and run, and why it would be refused. Writes nothing."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from slurmddp.alerts import secrets
from slurmddp.assets import package_folder
from slurmddp.cluster.client import Slurm
from slurmddp.commands import options as opt
from slurmddp.commands.new_file import write_new
from slurmddp.commands.options import Json
from slurmddp.commands.terminal import Progress, write_exactly
from slurmddp.errors import UserError, each_once, together
from slurmddp.job.plan.model import Plan
from slurmddp.job.resolve import Resolved
from slurmddp.job.sensitive import refuse_values
from slurmddp.job.types import slurm_time
from slurmddp.launch.avoid import avoid
from slurmddp.launch.job_check.rule import advice
from slurmddp.launch.prepare import Prepared
from slurmddp.launch.problems import problems, refusals, unknown_here
from slurmddp.launch.submit import command_line, still_going
from slurmddp.launch.submit import submit as submit_now
from slurmddp.launch.workdir import files_before, relative_paths, shared_files
from slurmddp.launch.write import run_files, survey_project
from slurmddp.render.plain import missing, plain_script
from slurmddp.report.plan import cost_line, nodes_text, plan_facts, program_text, workdir_text
from slurmddp.run import snapshot
from slurmddp.run.checkpoints import start_of
from slurmddp.run.layout import RunFolder
from slurmddp.run.survey import Survey
from slurmddp.styled import labelled

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

    folder: RunFolder
    command: tuple[str, ...]
    scripts: dict[str, str]
    machinery: dict[str, str]
    code_hash: str | None
    warnings: tuple[str, ...]
    refusals: tuple[UserError, ...]
    unchecked: tuple[UserError, ...] = ()

    @property
    def machinery_source(self) -> Path:
        """Return where the shell functions are now."""
        return package_folder() / "shell"

    def as_dict(self, prepared: Prepared) -> dict[str, Any]:
        """Return the dry run for --json; docs/files.md has the keys."""
        plan, refusal = prepared.plan, together(self.refusals) if self.refusals else None
        return {
            **plan_facts(plan),
            "run_folder": str(self.folder.path),
            "command": list(self.command),
            "scripts": self.scripts,
            "machinery": {
                "path": str(self.folder.code_archive),
                "source": str(self.machinery_source),
                "code_hash": self.code_hash,
                "files": self.machinery,
            },
            "warnings": [*(note.text for note in plan.notes), *self.warnings],
            "unchecked": [str(error) for error in self.unchecked],
            "refusal": None if refusal is None else str(refusal),
        }


def dry_run(prepared: Prepared, refused: UserError | None = None) -> DryRun:
    """Check what `submit` checks, and collect what it would write.

    refused: why the job could not even be prepared as `submit` prepares it.
    Raises UserError where nothing may be shown: a secret stands in one of the files.
    """
    plan = prepared.plan
    files = run_files(prepared, RUN_ID)
    found_here = each_once([*(refused.parts if refused else ()), *refusals(prepared, program=refused is None)])
    unchecked = unknown_here(plan, found_here)
    refused_here = [error for error in found_here if error not in unchecked]
    variables = {name: os.environ[name] for name in plan.environment_from if os.environ.get(name)}
    try:
        refuse_values(variables, files)
    except UserError as error:
        raise together([*refused_here, error]) from None
    avoided = avoid(prepared)
    warnings = [
        *advice(prepared),
        *shared_files(plan, files_before(prepared)),
        *relative_paths(plan),
        *still_going(prepared),
        *avoided.warnings,
    ]
    found: Survey | None = None
    code_hash = None
    try:
        found = survey_project(plan)
        code_hash = snapshot.hash_of(found)
    except UserError as error:
        if not refused_here:  # one of them may be the same: a project that is not there
            refused_here.append(error)
    folder = RunFolder(Path(plan.runs_root) / RUN_ID)
    return DryRun(
        folder,
        command_line(plan, folder, avoided.options),
        {name: text for name, text in files.items() if name in ("job.sh", "node.sh") or name.startswith("payloads/")},
        {name: path.read_text("utf-8") for name, path in snapshot.machinery().items()},
        code_hash,
        (*warnings, *(found.warnings if found else ())),
        tuple(refused_here),
        tuple(unchecked),
    )


def summary_lines(plan: Plan, resolved: Resolved, folder: RunFolder, command: Sequence[str]) -> list[str]:
    """Return what the job is, where it would write, and what it would run."""
    rows = [
        ("site", f"{plan.site} ({resolved.site_from})"),
        ("nodes", nodes_text(plan)),
        ("ranks", _ranks(plan)),
        ("batch", _batch(plan)),
        ("time", _time(plan)),
        ("image", plan.container.image or f"none; {plan.container.python} of the nodes"),
        ("program", program_text(plan)),
        ("directory", workdir_text(plan)),
        ("cost", cost_line(plan).removeprefix("cost: ")),
        ("writes", f"{folder.path} (RUN_ID: {plan.name}-DATE-TIME-XXXX)"),
        ("runs", shlex.join(command)),
    ]
    if plan.alerts:
        rows.append(("alerts", ", ".join(target.name for target in plan.alerts.targets)))
    return [f"{name:<10}{text}" for name, text in rows]


def machinery_lines(plan: Plan, folder: RunFolder, source: Path, code_hash: str | None, *, full: bool) -> list[str]:
    """Return where the shell functions are, and the hash of the code in the run folder."""
    rows = [
        ("functions", f"{folder.code_archive}, from {source}"),
        ("code hash", code_hash or "unknown: the project cannot be copied"),
    ]
    if not full:
        rows.append(("more", f"--full prints the functions{' and the payloads of alerts' if plan.alerts else ''}"))
    return [f"{name:<10}{text}" for name, text in rows]


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
    product = f"{batch.micro} (micro batch) x {batch.accumulation} (accumulation) x {plan.nodes.world} (ranks)"
    return f"{batch.total} = {product}" if batch.even else f"{batch.total}, uneven, of at most {product}"


def _time(plan: Plan) -> str:
    if plan.scheduler == "local":
        return "no limit"
    limit = "the partition's default" if plan.time is None else slurm_time(plan.time)
    return limit + (f"; ranks save {plan.stop_lead} s before" if plan.stop_lead else "")


class PlainJob(NamedTuple):
    """missing: what the supervised job does and this one does not. job_id: None in a dry run, as is the log."""

    file: str
    script: str
    missing: tuple[str, ...]
    job_id: str | None = None
    log: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return it for --json."""
        number = (self.job_id or "").partition(";")[0]
        next_ = [f"squeue --job={number}", f"scancel {number}", f"slurmddp doctor {self.log}"] if number else []
        return {**self._asdict(), "missing": list(self.missing), "next": next_ or [f"sbatch {self.file}"]}


def plain_job(prepared: Prepared, refused: UserError | None, *, submit: bool) -> PlainJob:
    """Render the script and, with `submit`, write it to this folder and submit it.

    refused: why the job could not be prepared. Raises UserError, ExternalError.
    """
    plan = prepared.plan
    errors = each_once([*(refused.parts if refused else ()), *problems(prepared, program=refused is None)])
    unchecked = [] if submit else unknown_here(plan, errors)
    if errors := [error for error in errors if error not in unchecked]:
        raise together(errors)
    path = Path(f"{plan.name}.sbatch")
    text = plain_script(plan, path.name)
    found = PlainJob(path.name, text, tuple(missing(plan)))
    if not submit:
        return found
    secrets.take_variables(plan.environment_from, dict(os.environ))  # sbatch hands them on: only looked at
    if not path.is_file() or path.read_bytes() != text.encode("utf-8", errors="surrogateescape"):
        todo = f"`sbatch {path}` submits it as it is; remove it, or choose another name with --name"
        write_new(path, text, todo=todo)
    job_id = str(Slurm().submit(Slurm.sbatch_command((), path.name, ()), Path.cwd()))
    return found._replace(job_id=job_id, log=str(Path.cwd() / f"{plan.name}-{job_id.partition(';')[0]}.log"))


DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Check the job and print its summary and scripts; write and submit nothing")
]


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
    if full and not dry_run:
        raise UserError("--full needs --dry-run", todo="add --dry-run, or remove --full")
    if plain:
        refused = {"--resume": resume, "--full": full, "--explain": explain}
        if other := next((name for name, given in refused.items() if given), None):
            raise UserError(f"--plain and {other} cannot be combined", todo="remove one of them")
        _plain(asked, dry_run=dry_run, as_json=as_json)
        return
    if dry_run and not explain:
        show_dry_run(asked, resume, as_json=as_json, full=full)
        return
    prepared = asked.prepare(strict=not explain, resume=resume)
    if explain:
        opt.show_explanation(prepared, explain)
        return
    hand_over(prepared, as_json=as_json)


def _plain(asked: opt.Asked, *, dry_run: bool, as_json: bool) -> None:
    """Submit the plain script, or print it; stderr has what it lacks."""
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


def hand_over(prepared: Prepared, *, as_json: bool, repeats: str | None = None) -> None:
    """Submit the job, and print its run. repeats: the run that it repeats."""
    opt.show_notes(prepared)

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


def show_dry_run(asked: opt.Asked, resume: str | None, *, as_json: bool, full: bool) -> None:
    """Show what `submit` would write and run, or say why it would refuse the job."""
    prepared, refused = asked.prepare_or_refuse(resume)
    show_what_submit_does(prepared, refused, as_json=as_json, full=full)


def show_what_submit_does(
    prepared: Prepared, refused: UserError | None = None, *, as_json: bool, full: bool = False
) -> None:
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


def _show_dry_run(prepared: Prepared, found: DryRun, *, full: bool) -> None:
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
