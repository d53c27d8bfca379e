"""preflight: check the nodes and the network of a job, without training."""

from typing import Annotated

import typer

from slurmddp.cli import options as opt
from slurmddp.cli.help import App
from slurmddp.styled import styled


def register(app: App) -> None:
    """Put the command on the app."""
    app.add("Jobs", preflight, example="slurmddp preflight job.yaml --nodes 4")


@opt.job_command()
def preflight(
    asked: opt.Asked,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout")] = False,
) -> None:
    """Check the nodes of a job and measure their network, without training. Submits a job for the same nodes and
    GPUs (at most 10 minutes), waits for it and prints what it found. Exit codes: 0 the job could train, 1 it could not,
    2 the job cannot be submitted."""
    from slurmddp.launch.preflight import CHANGES, DEFAULTS, Preflight
    from slurmddp.visible import one_line

    def options(changes: tuple[tuple[str, str], ...]) -> list[tuple[str, str, str]]:
        return [(key, value, f"the preflight's {key}") for key, value in changes]

    asked = asked._replace(options=[*options(DEFAULTS), *asked.options, *options(CHANGES)])
    prepared = asked.prepare(strict=True)
    opt.show_notes(prepared)
    check = Preflight(prepared, opt.say)
    opt.say(f"run     {check.folder.id} (Ctrl-C cancels it)")
    found = check.wait()
    if as_json:
        typer.echo(opt.json_text({"schema": 1, "run": check.folder.id, **found.as_dict}))
    else:
        for line in found.lines:
            typer.echo(one_line(f"node    {line}"))
        typer.echo(one_line(f"network {found.network.text}"))
        if found.passed:
            typer.echo(styled("The job can train on this cluster.", "good"))
        else:
            typer.echo(styled("FAILED", "bad") + one_line(f"  {found.cause or found.state}"))
    if not found.passed:
        raise typer.Exit(1)
