"""check: what a job will do, what would make it fail and what it costs, before it waits in the queue."""

from dataclasses import replace
from pathlib import Path

import typer

from slurmddp.commands import options as opt
from slurmddp.commands.check import nodes, rehearsal
from slurmddp.commands.check import script as scripts
from slurmddp.commands.check.job import examine
from slurmddp.commands.check.useful_share import useful_share_lines
from slurmddp.errors import UserError
from slurmddp.job.resolve import Request
from slurmddp.launch.prepare import Prepared, prepare, prepare_or_refuse
from slurmddp.launch.problems import driver_verdict
from slurmddp.launch.write import write_rendered
from slurmddp.render.per_node import node_commands
from slurmddp.report.plan import plan_report
from slurmddp.styled import exact, join, labelled

_NODES = "On the cluster's nodes"
_SCRIPT = "Batch scripts that slurmddp did not write"
_MORE = "More options"


@opt.job_command()
def check(
    request: Request,
    as_json: opt.Json = False,
    write: Path | None = opt.value(
        "DIR", "Write the scripts, code and resolved job file to DIR, to run it by hand", "--write"
    ),
    partitions: bool = opt.flag("--partitions", "Also rank the partitions by when they would start the job"),
    strict: bool = opt.flag("--strict", "Exit with 1 for warnings, too"),
    preflight: bool = opt.flag(
        "--preflight",
        "Submit a job that checks its nodes and measures their network, without training (10 minutes at most)",
        panel=_NODES,
    ),
    rehearse: bool = opt.flag(
        "--rehearse",
        "Break it: does it survive its time limit and a crashed rank? Your own script: on this machine, in "
        "one to five minutes; a bundled task: as a job",
    ),
    script: bool = opt.flag("--script", "Check FILE... as batch scripts, whatever their names are", panel=_SCRIPT),
    fix: bool = opt.flag("--fix", "Print the corrected script; findings go to stderr", panel=_SCRIPT),
    output: Path | None = opt.value("FILE", "With --fix: write it to a new file", "-o", "--output", panel=_SCRIPT),
    force: bool = opt.flag("--force", "With -o: replace FILE if it exists", panel=_SCRIPT),
    resume: opt.Resume = None,
    explain: opt.Explain = None,
    mtbf: float | None = opt.value(
        "HOURS",
        "Hours between failures of one node: estimate the share of the time that trains, also on more nodes",
        panel=_MORE,
    ),
    per_node: bool = opt.flag(
        "--per-node", "Print each node's torchrun command, for clusters without Slurm", panel=_MORE
    ),
    head: str | None = opt.value("HOST", "Host name of the first node, for --per-node [default: HEAD]", panel=_MORE),
    port: int | None = opt.value(
        "PORT", "Rendezvous port, for --per-node [default: 29400]", min=1024, max=65535, panel=_MORE
    ),
) -> None:
    """Show what a job will do, what would make it fail, and what it costs. Submits nothing without --preflight or
    --rehearse. Exit codes: 0 no errors, 1 errors found, 2 the job file has mistakes, or a file cannot be read."""
    of_scripts = script or fix or scripts.is_batch_script(request.job)
    opt.needs(
        (output, "-o", fix, "--fix"),
        (force, "--force", output, "-o"),
        (head, "--head", per_node, "--per-node"),
        (port, "--port", per_node, "--per-node"),
    )
    mode = opt.one_of({
        "--write": write, "--preflight": preflight, "--rehearse": rehearse, "--per-node": per_node,
        "--explain": explain, "--fix" if fix else "--script": of_scripts,
    })  # fmt: skip
    shows_part = mode in ("--write", "--per-node", "--explain")
    beside = {"--mtbf": mtbf, "--partitions": partitions, "--resume": None if shows_part else resume}
    for option, value in beside.items():
        opt.one_of({mode or "": mode, option: value})
    if mtbf is not None and not 0 < mtbf < float("inf"):
        raise UserError(f"--mtbf: {mtbf:g} is not a number of hours above 0")
    request = replace(request, resume=resume)
    if mode == "--fix":
        severities = scripts.fix_script(request, output, force=force, as_json=as_json)
    elif mode == "--script":
        severities = scripts.check_scripts(request, as_json=as_json)
    elif mode == "--preflight":
        severities = nodes.preflight(request, as_json=as_json)
    elif mode == "--rehearse":
        severities = rehearsal.rehearse(request, as_json=as_json)
    elif shows_part:
        if as_json:
            raise UserError(f"--json does not go with {mode}", todo="submit --dry-run --json has the scripts")
        _show_part(prepare(request, strict=False), write, explain, head or "HEAD", port or 29400)
        severities = set()
    else:
        severities = _check_job(request, partitions=partitions, mtbf=mtbf, as_json=as_json)
    if severities & ({"error", "warning"} if strict else {"error"}):
        raise typer.Exit(1)


def _show_part(prepared: Prepared, write: Path | None, explain: str | None, head: str, port: int) -> None:
    if explain:
        opt.show_explanation(prepared, explain)
    elif write:
        opt.show_notes(prepared)
        for path in write_rendered(prepared, write, opt.say):
            typer.echo(path)
    else:
        typer.echo(exact("\n".join(node_commands(prepared.plan, head, port))))


def _check_job(request: Request, *, partitions: bool, mtbf: float | None, as_json: bool) -> set[str]:
    """Print what the job will do, then what would make it fail. Return the severities. Raises UserError."""
    prepared, refused = prepare_or_refuse(request)
    answer = examine(prepared, refused, partitions=partitions)
    if as_json:
        typer.echo(opt.json_text(answer.as_dict()))
    else:
        typer.echo(plan_report(prepared.plan, prepared.resolved))
        verdict = driver_verdict(prepared)
        if verdict is not None and verdict.kind in ("native", "minor"):  # a rule speaks of the others
            typer.echo(labelled("note", f"CUDA: {verdict.why}"))
        if mtbf is not None:
            typer.echo("\n".join(["", *useful_share_lines(prepared.plan, prepared.resolved.job.checkpoint, mtbf)]))
        if refused is None:
            typer.echo(join("\n", ["", *answer.lines()]))
    if refused is not None:
        raise refused
    return {each.severity for each in answer.findings}
