"""sync: the metrics of a run, to a tracker."""

import os

import typer

from slurmddp.api import ASK_EVERY, await_event, look
from slurmddp.commands import options as opt
from slurmddp.errors import UserError
from slurmddp.launch.find import find_own_run
from slurmddp.run.evidence import evidence
from slurmddp.run.layout import RunFolder
from slurmddp.run.state import RunState, judge
from slurmddp.trackers.sync import sync as send


def sync(
    to: str = opt.value("TRACKER", "wandb, mlflow or tensorboard", "--to", default=..., complete=opt.tracker_names),
    run: opt.Run = opt.LAST,
    follow: bool = opt.flag("--follow", "Continue until the run is over", "-f"),
    as_json: opt.Json = False,
) -> None:
    """Send the metrics of a run to a tracker, from this machine. Sends only what is new."""
    todo = "copy the run folder, then sync the copy"
    folder = find_own_run(run, os.environ, to="write there how far it was sent", todo=todo)
    wait = (lambda: await_event(folder, ASK_EVERY)) if follow else None
    sent, lines = send(folder, to, lambda: _state(folder), wait)
    if as_json:
        fields = {"run_id": folder.id, "to": to, "where": sent.where, "lines": lines, "step": sent.step}
        typer.echo(opt.json_text(fields))
        return
    amount = f"{lines} lines of metrics.jsonl, up to step {sent.step}" if lines else "nothing: no new lines"
    typer.echo(f"sent    {amount}")
    if sent.where:
        typer.echo(f"to      {sent.where}")


def _state(folder: RunFolder) -> RunState:
    """Return the run's state. A copy of a run folder is also synced where there is no Slurm."""
    try:
        return look(folder).state
    except UserError:
        return judge(None, evidence(folder), answered=False)
