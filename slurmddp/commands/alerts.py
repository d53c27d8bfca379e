"""alert test, alert watch: whether alerts arrive, and sending what nodes could not."""

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from slurmddp.commands import options as opt
from slurmddp.commands.help import App

if TYPE_CHECKING:
    from slurmddp.run.layout import RunFolder


def register(app: App) -> None:
    """Put the group's commands on the app."""
    group = App(help="Test whether alerts arrive, and send those that nodes could not")
    group.add(None, alert_test, name="test", example="slurmddp alert test job.yaml")
    group.add(None, watch, example="slurmddp alert watch last")
    app.add_typer(group, name="alert", rich_help_panel="Sites and alerts")


@opt.job_command()
def alert_test(asked: opt.Asked, as_json: opt.Json = False) -> None:
    """Send a sample of each kind of alert to each target, and show the answers."""
    from slurmddp.alerts.sample import send_samples

    samples = send_samples(asked.prepare(strict=False).plan, os.environ)
    if as_json:
        typer.echo(opt.json_text([sample._asdict() for sample in samples]))
    else:
        typer.echo("\n".join(map(str, samples)))
    raise typer.Exit(int(any(sample.arrived is False for sample in samples)))


def watch(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN", help="Runs to watch, as for status  [default: all]", autocompletion=opt.run_names
        ),
    ] = None,
    every: Annotated[int, typer.Option(min=1, metavar="SECONDS", help="Interval between checks")] = 20,
    once: Annotated[
        bool, typer.Option("--once", help="Check once, then exit (exit code 1: some alerts were not sent)")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object per check that found any")] = False,
) -> None:
    """Send the alerts of runs whose nodes have no internet, until Ctrl-C."""
    import time

    from slurmddp.alerts.spool import deliver_all
    from slurmddp.launch.find import find_run, known_runs

    named = [find_run(run, os.environ) for run in runs or ()]
    if not once:
        which = ", ".join(folder.id for folder in named) or "all known runs"
        opt.say(f"checking {which} every {every} s; Ctrl-C stops")
    told = ""
    while True:
        entries = [] if named else known_runs(os.environ)
        done = deliver_all(named or [entry.folder for entry in entries], seconds=60)
        if as_json and (once or done.sent or done.left):
            typer.echo(opt.json_text({"sent": done.sent, "left": done.left, "why": done.why or None}))
        elif done.sent:
            typer.echo(f"alerts sent: {done.sent}")
        if done.left and done.why != told:
            opt.say(
                f"alerts not sent yet: {done.left} ({done.why})" if done.why else f"alerts not sent yet: {done.left}"
            )
        told = done.why
        if once and not (done.sent or done.left):
            opt.say("no alerts to send")
        if once:
            raise typer.Exit(1 if done.left else 0)
        time.sleep(every)


def send_waiting(folders: "Iterable[RunFolder]") -> None:
    """Send delayed alerts, in two seconds at most, and say so: other commands do this on their way."""
    from slurmddp.alerts.spool import deliver_all

    done = deliver_all(folders)
    if done.sent:
        opt.say(f"note: sent {done.sent} delayed alert{'s' if done.sent > 1 else ''}")
