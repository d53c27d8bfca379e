"""alert test, alert watch: whether alerts arrive, and sending what nodes could not."""

import os
import time

import typer

from slurmddp.alerts.sample import send_samples
from slurmddp.alerts.spool import deliver_all
from slurmddp.commands import options as opt
from slurmddp.commands.help import App
from slurmddp.commands.listed import BY_NAME
from slurmddp.job.resolve import Request
from slurmddp.launch.find import find_run, known_runs
from slurmddp.launch.prepare import prepare


@opt.job_command()
def alert_test(request: Request, as_json: opt.Json = False) -> None:
    """Send a sample of each kind of alert to each target, and show the answers."""
    samples = send_samples(prepare(request, strict=False).plan, os.environ)
    if as_json:
        typer.echo(opt.json_text([sample._asdict() for sample in samples]))
    else:
        typer.echo("\n".join(map(str, samples)))
    raise typer.Exit(int(any(sample.arrived is False for sample in samples)))


def watch(
    runs: list[str] | None = opt.argument(
        "RUN", "Runs to watch, as for status  [default: all]", complete=opt.run_names
    ),
    every: int = opt.value("SECONDS", "Interval between checks", default=20, min=1),
    once: bool = opt.flag("--once", "Check once, then exit (exit code 1: some alerts were not sent)"),
    as_json: bool = opt.flag("--json", "Print a JSON object per check that found any"),
) -> None:
    """Send the alerts of runs whose nodes have no internet, until Ctrl-C."""
    named = [find_run(run, os.environ) for run in runs or ()]
    if not once:
        which = ", ".join(folder.id for folder in named) or "all known runs"
        opt.say(f"checking {which} every {every} s; Ctrl-C stops")
    last_reason = ""
    while True:
        entries = [] if named else known_runs(os.environ)
        done = deliver_all(named or [entry.folder for entry in entries], seconds=60)
        if as_json and (once or done.sent or done.left):
            typer.echo(opt.json_text({"sent": done.sent, "left": done.left, "why": done.why or None}))
        elif done.sent:
            typer.echo(f"alerts sent: {done.sent}")
        if done.left and done.why != last_reason:
            opt.say(
                f"alerts not sent yet: {done.left} ({done.why})" if done.why else f"alerts not sent yet: {done.left}"
            )
        last_reason = done.why
        if once and not (done.sent or done.left):
            opt.say("no alerts to send")
        if once:
            raise typer.Exit(1 if done.left else 0)
        time.sleep(every)


group = App(name="alert", help=BY_NAME["alert"].summary)
group.add(alert_test, "test", "slurmddp alert test job.yaml")
group.add(watch, example="slurmddp alert watch last")
