"""tune: measure how large the batch may be, how many nodes are worth it, and how ranks should share the model."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import typer

from slurmddp.commands import options as opt
from slurmddp.commands.check.nodes import watched
from slurmddp.commands.check.sandbox import START_SECONDS, RehearsalRun, Sandbox, on_this_machine, sandboxed, why
from slurmddp.commands.run import run_foreground
from slurmddp.commands.terminal import write_new
from slurmddp.errors import ExternalError, UserError
from slurmddp.job.plan.model import Plan
from slurmddp.job.resolve import Request
from slurmddp.job.types import mebibytes
from slurmddp.launch.named_file import JOB_SUFFIXES
from slurmddp.launch.prepare import Prepared, prepare
from slurmddp.records.metrics import Metrics
from slurmddp.records.tuning import REQUEST, RESULT, Order, Tuned, read
from slurmddp.render.documents import job_yaml
from slurmddp.report import tuning
from slurmddp.report.tuning import observed
from slurmddp.run.layout import RunFolder
from slurmddp.run.metrics import behind
from slurmddp.shared.files import text_or_empty
from slurmddp.shared.tuning import sizes
from slurmddp.visible import one_line

#: What the measurement changes of the job: DEFAULTS give way to the user's own options, CHANGES do not.
DEFAULTS = (("resources.time", "30m"),)
CHANGES = (
    ("recovery.requeue", "never"), ("recovery.no_progress", "1"), ("timeouts.hang", "null"),
    ("parallel.replicate", "null"), ("parallel.shard", "1"), ("parallel.tensor", "1"),
)  # fmt: skip

#: Lines of the observer, one of the first step and then one every ten seconds, that tell the speed of a script.
_LINES = 4
_OF_SCRIPTS = (
    "not measured of a script: memory, the largest micro batch, shards, the loader alone, the noise scale, "
    "more than this machine"
)
_NO_TENSOR = "not measured: tensor parallelism, so the job file has parallel.tensor 1"


@opt.job_command()
def tune(
    request: Request,
    output: Path | None = opt.value("FILE", "Job file to write  [default: NAME.tuned.yaml]", "-o", "--output"),
    share: float = opt.value(
        "SHARE", "What one more node has to bring, as a share of the first one", default=0.5, min=0.01, max=1
    ),
    margin: float = opt.value("SHARE", "Share of the memory that stays free", default=0.1, min=0, max=0.9),
    memory: str | None = opt.value(
        "SIZE", "Memory per rank, such as 8G  [default: the GPU's; on CPUs, its share of --mem]"
    ),
    force: bool = opt.flag("--force", "Replace files that exist"),
    as_json: opt.Json = False,
) -> None:
    """Measure in minutes how large the batch may be, how many nodes are worth it, and what the limit is.

    Runs here if this is an allocation or a machine without Slurm, else as one short job. A script of your own runs on
    this machine only, whatever --nodes says. Writes a job file with the choice and its reasons, and a page with charts.
    Exit codes: 0 measured, 1 not or in part, 2 a mistake."""
    # Inside of an allocation, a range of nodes would be refused: this one is only looked at.
    probe = replace(request.adding(("resources.nodes", "1", "slurmddp tune"), *_options(CHANGES)), inside=True)
    plan = prepare(probe, strict=False).plan
    file = output or Path(f"{plan.job.name}.tuned.yaml")
    page = file.with_suffix(".html")
    if file.suffix not in JOB_SUFFIXES:
        raise UserError(f"-o {file} is no name of a job file", todo="choose a name that ends in .yaml")
    if not os.access(file.parent, os.W_OK):
        raise UserError(f"cannot write into {file.parent}", todo="choose another folder with -o")
    for path in () if force else (file, page):
        if path.exists():
            raise UserError(f"{path} exists", todo="choose another name with -o, or add --force")
    if plan.program.own:
        opt.one_of({"--memory": memory, "a script": True}, todo="remove it: a script's memory is not measured")
        here, (folder, tuned, failed) = not plan.site.queues, _script(request)
    else:
        here = "SLURM_JOB_ID" in os.environ or not plan.site.queues
        # Another name: `last`, `resume` and `scaling` mean the job's own runs.
        measured = replace(request.adding(("name", f"{plan.job.name}-tune", "slurmddp tune")), inside=here)
        folder, tuned, failed = _task(measured, margin, memory, quiet=as_json)
        if plan.job.train.task == "lm":
            tuned = tuned._replace(notes=(*tuned.notes, _NO_TENSOR))
    if failed:
        tuned = tuned._replace(notes=(*tuned.notes, f"not all was measured: {failed}"))
    verdict = tuning.judge(tuned, share, cluster=bool(plan.site.queues))
    settings = ((key, value, "slurmddp tune") for key, value in verdict.choice.options.items())
    chosen = prepare(replace(request, inside=here).adding(*settings), strict=False)
    write_new(file, _job_file(chosen, verdict), force=force)
    write_new(page, tuning.html(tuned, verdict, f"Tuning of {plan.job.name}"), force=force)
    answer = {**verdict.as_dict(tuned), "folder": str(folder), "job_file": str(file), "page": str(page)}
    opt.show(as_json, answer, [one_line(line) for line in tuning.lines(tuned, verdict)])
    opt.say(f"job     {file}\npage    {page}")
    if failed:
        raise typer.Exit(1)


def _task(request: Request, margin: float, memory: str | None, *, quiet: bool) -> tuple[Path, Tuned, str]:
    """Measure a task in its ranks. Returns the run folder, the result, and why it is not whole. Raises ExternalError if
    there is none.
    """
    prepared = prepare(replace(request, options=[*_options(DEFAULTS), *request.options, *_options(CHANGES)]))
    opt.show_notes(prepared)
    order = Order(margin, _memory(memory, prepared.plan))
    prepared = prepared._replace(files={REQUEST: order.text()})
    folder, failed = _run(prepared, quiet=quiet) if request.inside else _submit(prepared)
    tuned = _result(folder)
    if tuned is None or not tuned.points:
        raise ExternalError(f"nothing was measured: {failed or '; '.join(tuned.notes if tuned else ()) or 'no result'}")
    return folder.path, tuned, failed


def _script(request: Request) -> tuple[Path, Tuned, str]:
    """Run a script on 1, 2, 4, ... ranks of this machine as the rehearsal does, and read what the observer saw."""
    points, failed = [], ""
    with sandboxed(on_this_machine(request)) as sandbox:
        opt.say(f"tune {sandbox.plan.job.name} on up to {sandbox.ranks} ranks of this machine alone, in {sandbox.root}")
        try:
            for ranks in sizes(sandbox.ranks):
                opt.say(f"  ranks {ranks}")
                if (point := observed(_observed(sandbox, ranks), ranks)) is None:
                    failed = f"the script made too few steps on {ranks} ranks: it has to run for half a minute"
                    break
                points.append(point)
        except UserError as error:
            if not points:
                raise
            failed = str(error)
    if not points:
        raise ExternalError(f"nothing was measured: {failed}")
    shutil.rmtree(sandbox.root, ignore_errors=True)
    return sandbox.root, Tuned("", None, points=tuple(points), notes=(_OF_SCRIPTS,)), failed


def _observed(sandbox: Sandbox, ranks: int) -> list[Metrics]:
    """Run the script as it is until the observer has written enough. Returns its lines. Raises UserError."""
    sandbox.ranks = ranks
    run = RehearsalRun(sandbox, f"timed-{ranks}", None)

    def seen() -> list[Metrics]:
        return [row for rows, _ in behind(run.folder.metrics, 0) for row in rows if row.of_ranks]

    if run.start(lambda _: len(seen()) >= _LINES, START_SECONDS):
        raise UserError(f"it fails on {ranks} ranks: {why(run.folder)}")
    return seen()


def _options(changes: tuple[tuple[str, str], ...]) -> list[tuple[str, str, str]]:
    return [(key, value, f"the {key} of tune") for key, value in changes]


def _memory(text: str | None, plan: Plan) -> int | None:
    """Return the bytes that a rank may have, if they are known here: a GPU's are known there. Raises UserError."""
    if text is not None:
        try:
            return int(mebibytes(text)) << 20
        except ValueError as error:
            raise UserError(f"--memory {text!r} {error}") from None
    layout, ranks = plan.layout, plan.nodes.ranks_per_node
    if layout.gpus_per_node or not layout.mem_per_node or not ranks:
        return None
    return (layout.mem_per_node << 20) // ranks


def _run(prepared: Prepared, *, quiet: bool) -> tuple[RunFolder, str]:
    code, folder = run_foreground(prepared, quiet=quiet)
    return folder, why(folder) if code else ""


def _submit(prepared: Prepared) -> tuple[RunFolder, str]:
    folder, state = watched(prepared)
    return folder, "" if state.state == "done" else why(folder)


def _result(folder: RunFolder) -> Tuned | None:
    """Return what rank 0 wrote; None if it wrote nothing. Raises ExternalError if that cannot be read."""
    text = text_or_empty(folder.path / RESULT)
    try:
        return read(text) if text else None
    except ValueError as error:
        raise ExternalError(f"{folder.path / RESULT} {error}") from error


def _job_file(prepared: Prepared, verdict: tuning.Verdict) -> str:
    """Return the job with the choice, its reasons above it."""
    reasons = [f"# - {one_line(reason)}" for reason in verdict.choice.reasons]
    head = ["# Written by slurmddp tune. You can submit this file as it is. Why these values:", *reasons]
    return "\n".join([*head, job_yaml(prepared.resolved, prepared.plan).partition("\n")[2]])
