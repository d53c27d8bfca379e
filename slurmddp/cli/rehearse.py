"""rehearse: a short run on the user's own cluster that is broken on purpose."""

from typing import Annotated

import typer

from slurmddp.cli import options as opt
from slurmddp.cli.help import App
from slurmddp.styled import styled


def register(app: App) -> None:
    """Put the command on the app."""
    app.add("Jobs", rehearse, example="slurmddp rehearse job.yaml --time 30m")


@opt.job_command()
def rehearse(
    asked: opt.Asked,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout")] = False,
) -> None:
    """Prove that a job survives its time limit and a crashed rank on this cluster. Submits the job, sends it the
    signal of its time limit, waits until it is requeued and resumes, kills a rank, compares the losses, cancels it.
    Uses the nodes for a few minutes. Exit codes: 0 survived, 1 a step failed, 2 the job cannot be rehearsed."""
    from slurmddp.launch.rehearse import CHANGES, Rehearsal, RehearsalFailed

    changes = [(key, value, f"the rehearsal's {key}") for key, value in CHANGES]
    prepared = asked._replace(options=[*asked.options, *changes]).prepare(strict=True)
    opt.show_notes(prepared)
    rehearsal = Rehearsal(prepared, opt.say)
    opt.say(f"run     {rehearsal.folder.id} (Ctrl-C cancels it)")
    steps, failed = [], None
    try:
        for step in rehearsal.steps():
            steps.append(step)
            if not as_json:
                typer.echo(styled("ok", "good") + f"      {step.name}: {step.detail} ({step.seconds:.0f} s)")
    except RehearsalFailed as error:
        failed = error
    if as_json:
        why = None if failed is None else {"step": failed.step, "why": str(failed)}
        told = {"schema": 1, "run": rehearsal.folder.id, "survived": failed is None, "failed": why}
        typer.echo(opt.json_text({**told, "steps": [step._asdict() for step in steps]}))
    elif failed is not None:
        typer.echo(styled("FAILED", "bad") + f"  {failed.step}: {failed}")
        typer.echo(f"Your job did not survive this step on this cluster. See: slurmddp logs {rehearsal.folder.id}")
    else:
        typer.echo("Your job survives its time limit, a requeue and a crashed rank on this cluster.")
    if failed is not None:
        raise typer.Exit(1)
