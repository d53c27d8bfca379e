"""check --preflight, check --rehearse: jobs that find out on the cluster's nodes whether a job can train and survive.

Both return the severities of what they found: an error if the job could not.
"""

import typer

from slurmddp.commands import options as opt
from slurmddp.styled import styled


def preflight(asked: opt.Asked, *, as_json: bool) -> set[str]:
    """Submit a job for the same nodes and GPUs, wait for it and print what it found of nodes and network."""
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
    return set() if found.passed else {"error"}


def rehearse(asked: opt.Asked, *, as_json: bool) -> set[str]:
    """Submit the job, send it the signal of its time limit, wait until it resumes, kill a rank, compare the losses."""
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
    return set() if failed is None else {"error"}
