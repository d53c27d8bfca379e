"""debug shell, port, stacks, profile, bundle: a look into a running job, and what support needs to know of a run."""

import os
from pathlib import Path
from typing import Annotated

import typer

from slurmddp.commands import options as opt
from slurmddp.commands.follow import LAST, Json, Run
from slurmddp.commands.help import App
from slurmddp.commands.terminal import Progress
from slurmddp.styled import labelled


def register(app: App) -> None:
    """Put the group's commands on the app."""
    group = App(help="Look into a running job: a shell, a port, stacks, a profile; pack a run for support")
    group.add(None, shell, example="slurmddp debug shell last --node node2 -- nvidia-smi")
    group.add(None, port, example="slurmddp debug port last 6006")
    group.add(None, stacks, example="slurmddp debug stacks last")
    group.add(None, profile, example="slurmddp debug profile last --steps 10")
    group.add(None, bundle, example="slurmddp debug bundle last")
    app.add_typer(group, name="debug", rich_help_panel="Runs")


def shell(
    run: Run = LAST,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND", help="Command to run in place of a shell, after RUN --")
    ] = None,
    node: Annotated[
        str | None, typer.Option(metavar="NAME", help="Node to run on  [default: the first of the attempt]")
    ] = None,
) -> None:
    """Open a shell beside the ranks of a running job: same node, image, binds and environment."""
    from slurmddp.launch.find import find_own_run
    from slurmddp.launch.inside import attach, become

    become(*attach(find_own_run(run, os.environ, to="look into its job"), node, command or (), os.environ))


def port(
    run: Run,
    number: Annotated[int, typer.Argument(metavar="PORT", help="Port on the node", min=1, max=65535)],
    node: Annotated[
        str | None, typer.Option(metavar="NAME", help="Node of the port  [default: the first of the attempt]")
    ] = None,
    local_port: Annotated[
        int | None,
        typer.Option(metavar="PORT", help="Port on this machine  [default: the same]", min=1, max=65535),
    ] = None,
    stdio: Annotated[bool, typer.Option("--stdio", hidden=True)] = False,
) -> None:
    """Reach a port of a running job's node, such as TensorBoard's, from this machine, until Ctrl-C."""
    from slurmddp.launch import forward as forwarding
    from slurmddp.launch.find import find_own_run
    from slurmddp.launch.inside import become

    folder = find_own_run(run, os.environ, to="look into its job")
    words, environment = forwarding.command(folder, node, number, os.environ)
    if stdio:  # the end of `slurmddp --host ... debug port` on the login node
        become(words, environment)
    accepts = forwarding.listen(local_port or number)
    forwarding.forward(accepts, words, environment, lambda: forwarding.say_address(accepts, opt.say))


def stacks(
    run: Run = LAST,
    node: Annotated[str | None, typer.Option(metavar="NAME", help="Only the ranks of this node")] = None,
    as_json: Json = False,
) -> None:
    """Show the Python stack of each rank of a running job. Ranks with the same stack are one group."""
    from slurmddp.errors import ExternalError
    from slurmddp.launch.find import find_own_run
    from slurmddp.launch.inside import raw_stacks
    from slurmddp.report.stacks import as_dict, read_stacks, stacks_text

    folder = find_own_run(run, os.environ, to="look into its job")
    attempt, text, failed = raw_stacks(folder, node)
    ranks, missing = read_stacks(text)
    if failed:
        opt.say(labelled("warning", failed))
    if not ranks:
        raise ExternalError(f"no rank of run {folder.id} was found on its nodes: they may just be starting or exiting")
    absent = [] if node else missing
    typer.echo(opt.json_text(as_dict(attempt.number, ranks, absent)) if as_json else stacks_text(ranks, absent))


def profile(
    run: Run = LAST,
    steps: Annotated[int, typer.Option(metavar="N", help="Steps to profile", min=1, max=1000)] = 5,
    all_ranks: Annotated[bool, typer.Option("--all-ranks", help="Profile all ranks, not only rank 0")] = False,
    as_json: Json = False,
) -> None:
    """Profile some steps of a running job with torch.profiler, without a restart."""
    from slurmddp.errors import ExternalError
    from slurmddp.launch.find import find_own_run
    from slurmddp.launch.profile import ask_for_profile, wait_for_profile

    folder = find_own_run(run, os.environ, to="look into its job")
    known = ask_for_profile(folder, steps, all_ranks=all_ranks)
    opt.say(f"profiling {steps} steps; Ctrl-C withdraws the request if they have not begun")
    event, found = wait_for_profile(folder, known)
    if as_json:
        typer.echo(opt.json_text(event.write()))
    elif found.files:
        typer.echo(f"steps   {found.step} to {found.last}")
        for path in found.files:
            typer.echo(f"trace   {path}")
        opt.say("to see one: open it in https://ui.perfetto.dev, or in chrome://tracing")
    if found.error:
        raise ExternalError(f"torch.profiler failed: {found.error}")


def bundle(
    run: Run = LAST,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="File to write  [default: RUN-bundle.tar.gz]")
    ] = None,
    as_json: Json = False,
) -> None:
    """Pack what support needs to know of a run, without secrets: records, scripts, the ends of its logs, doctor's
    answer, versions, and what Slurm says. At most 8 MiB; look through it before you send it."""
    from slurmddp.api import look
    from slurmddp.commands.doctor import examine
    from slurmddp.launch.bundle import write_bundle
    from slurmddp.launch.find import find_any_version
    from slurmddp.report.doctor import lines
    from slurmddp.run.gate import own

    folder = own(find_any_version(run, os.environ), to="pack it")
    answers = {
        "status.json": lambda: opt.json_text(look(folder).as_dict()),
        "doctor.txt": lambda: "\n".join(map(str, lines(examine([str(folder.path)])[0].diagnose()))),
    }
    with Progress() as progress:
        progress.tell("packing")
        made = write_bundle(folder, output, answers, os.environ)
    if as_json:
        typer.echo(opt.json_text(made.as_dict()))
        return
    for packed in made.files:
        opt.say(str(packed))
    for text in made.left_out:
        opt.say(labelled("note", f"not packed: {text}"))
    typer.echo(made.path)
