"""runs, status, goodput, logs, cancel: what has become of a run."""

import os
from typing import TYPE_CHECKING, Annotated

import typer

from slurmddp.cli import options as opt
from slurmddp.cli.alerts import send_waiting
from slurmddp.cli.help import App
from slurmddp.cli.terminal import write_line

if TYPE_CHECKING:
    from slurmddp.report.status import RunStatus
    from slurmddp.runs.layout import RunFolder

Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Run id (or its first characters), job id, run folder, or last",
        autocompletion=opt.run_names,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout")]


def register(app: App) -> None:
    """Put the group's commands on the app."""
    app.add("Runs", runs, example="slurmddp runs -n 5")
    app.add("Runs", status, example="slurmddp status last")
    app.add("Runs", logs, example="slurmddp logs last -f")
    app.add("Runs", cancel, example="slurmddp cancel last --wait")
    app.add("Runs", goodput, example="slurmddp goodput last")


def _ask(folder: "RunFolder") -> "RunStatus":
    """Return the run's status. A job that Slurm holds back after a requeue may begin now: see `release_hold`."""
    from slurmddp.launch.requeue_hold import release_hold
    from slurmddp.report.status import run_status

    found = run_status(folder)
    told = release_hold(folder, found.facts, found.view)
    return found.with_note(told) if told else found


def runs(
    limit: Annotated[int, typer.Option("-n", "--limit", min=1, metavar="N", help="Show the N newest runs")] = 20,
    as_json: Json = False,
) -> None:
    """List your runs, newest last."""
    from slurmddp.launch.find import known_roots
    from slurmddp.launch.requeue_hold import release_hold
    from slurmddp.report.runs import list_runs, runs_table

    found = list_runs(limit, lambda: known_roots(os.environ), opt.say)
    for row in found:
        if row.status and (told := release_hold(row.folder, row.status.facts, row.status.view)):
            opt.say(f"note: {row.folder.id}: {told}")
    send_waiting([row.folder for row in found])
    typer.echo(opt.json_text([row.told for row in found]) if as_json else runs_table(found))


def status(run: Run, as_json: Json = False) -> None:
    """Show the state of a run. Exit code: 0 done; 1 failed, stopped or cancelled; 3 still pending or running."""
    from slurmddp.launch.find import find_run
    from slurmddp.report.goodput import goodput_line, recovered_line, run_ledger
    from slurmddp.report.status import status_text

    folder = find_run(run, os.environ)
    send_waiting([folder])
    found = _ask(folder)
    ledger = run_ledger(found.folder, going=found.state.going, quick=True)
    if as_json:
        typer.echo(opt.json_text({**found.as_dict(), "recovered": ledger.recovered if ledger else 0}))
    else:
        typer.echo(status_text(found, goodput_line(ledger), recovered_line(ledger)))
    raise typer.Exit(found.state.exit_code)


def goodput(run: Run, as_json: Json = False) -> None:
    """Show where a run's time went."""
    from slurmddp.launch.find import find_run
    from slurmddp.report.goodput import goodput_dict, goodput_text, never_submitted, run_ledger

    found = _ask(find_run(run, os.environ))
    going = found.state.going
    ledger = run_ledger(found.folder, going=going)
    if ledger is None:
        raise never_submitted(found.folder)
    if as_json:
        typer.echo(opt.json_text({"run_id": found.folder.id, **goodput_dict(ledger, going=going)}))
    else:
        typer.echo(goodput_text(ledger, going=going))
        for note in found.notes:
            opt.say(f"note: {note}")


def logs(
    run: Run,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Follow the logs until the run is over")] = False,
    node: Annotated[str | None, typer.Option(metavar="NAME", help="Show only this node")] = None,
    attempt: Annotated[int | None, typer.Option(min=0, metavar="N", help="Show only this attempt")] = None,
) -> None:
    """Show the logs of a run: job.sh first, then each node."""
    from slurmddp.launch.find import find_run
    from slurmddp.report.logs import follow_logs

    folder = find_run(run, os.environ)
    send_waiting([folder])
    for line in follow_logs(folder, ask=_ask, follow=follow, node=node, attempt=attempt, say=opt.say):
        write_line(line)


def cancel(
    run: Run,
    now: Annotated[bool, typer.Option("--now", help="Cancel at once, without saving a checkpoint")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the job has exited")] = False,
) -> None:
    """Cancel a run for good. A running job saves a checkpoint first."""
    from slurmddp.launch.cancel import cancel_run, wait_until_over
    from slurmddp.launch.find import find_run

    folder = find_run(run, os.environ)
    typer.echo(cancel_run(folder, now=now))
    if wait:
        state = wait_until_over(lambda: _ask(folder).state)
        typer.echo(state.line)
