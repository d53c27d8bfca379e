"""runs, status, logs, cancel: what has become of a run."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slurmddp.api import look
from slurmddp.commands import options as opt
from slurmddp.commands.alerts import send_waiting
from slurmddp.commands.help import App
from slurmddp.commands.terminal import write_line, write_lines
from slurmddp.styled import join

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from slurmddp.report.runs import Row
    from slurmddp.report.status import RunStatus
    from slurmddp.run.layout import RunFolder
    from slurmddp.run.ledger import Ledger
    from slurmddp.run.sweeps import Sweep

Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Run id (or its first characters), job id, run folder, or last (of this folder)",
        autocompletion=opt.run_names,
    ),
]
#: Which run is meant where none is named.
LAST = "last"
#: Seconds between two looks of `status --watch`.
LOOK_EVERY = 2.0
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask if `last` is a run of another folder")]
Json = opt.Json


def register(app: App) -> None:
    """Put the group's commands on the app."""
    app.add("Runs", runs, aliases=("ls", "ps"), example="slurmddp runs --state running")
    app.add("Runs", status, example="slurmddp status last --watch")
    app.add("Runs", logs, example="slurmddp logs last -f --tail 20")
    app.add("Runs", cancel, aliases=("stop",), example="slurmddp cancel last --wait")


def runs(
    limit: Annotated[int, typer.Option("-n", "--limit", min=1, metavar="N", help="Show the N newest runs")] = 20,
    state: Annotated[
        list[str] | None,
        typer.Option(metavar="STATE", help="Only runs in this state; may be repeated", autocompletion=opt.run_states),
    ] = None,
    site: Annotated[
        str | None, typer.Option(metavar="SITE", help="Only runs of this site", autocompletion=opt.site_names)
    ] = None,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="Only runs submitted since: 12h, 7d, 2w or 2026-11-30")
    ] = None,
    sweep: Annotated[
        str | None, typer.Option(metavar="SWEEP", help="Only runs of this sweep: its id, its folder, or last")
    ] = None,
    as_json: Json = False,
) -> None:
    """List your runs, newest last. Says why a pending run waits, and when it should start."""
    from slurmddp.launch.find import known_roots
    from slurmddp.report.runs import Wanted, list_runs, runs_table

    folder = find_sweep(sweep).folder if sweep is not None else None
    wanted = Wanted.asked(limit, state or (), site, since, folder)
    found = list_runs(wanted, lambda: known_roots(os.environ), opt.say)
    look_after(found)
    typer.echo(opt.json_text([row.told for row in found]) if as_json else runs_table(found))


def find_sweep(text: str) -> "Sweep":
    """Return the sweep that `text` names. Raises UserError."""
    from slurmddp.launch.find import known_runs
    from slurmddp.run import sweeps

    return sweeps.find(text, known_runs(os.environ))


def look_after(rows: "Sequence[Row]") -> None:
    """End holds of Slurm after a requeue, and send alerts that could not be sent before."""
    from slurmddp.launch.requeue_hold import release_hold

    for row in rows:
        if row.status and (told := release_hold(row.folder, row.status.facts, row.status.view)):
            opt.say(f"note: {row.folder.id}: {told}")
    send_waiting([row.folder for row in rows])


def status(
    run: Run = LAST,
    watch: Annotated[bool, typer.Option("--watch", help="Show it live, with curves, until the run is over")] = False,
    time: Annotated[bool, typer.Option("--time", help="Show where the run's time went, to the second")] = False,
    as_json: Json = False,
    prometheus: Annotated[
        bool, typer.Option("--prometheus", help="Print metrics for Prometheus's textfile collector")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE.prom", help="With --prometheus: write this file")
    ] = None,
) -> None:
    """Show the state of a run. Exit code: 0 done; 1 failed, stopped or cancelled; 3 still pending or running."""
    from slurmddp.errors import UserError
    from slurmddp.launch.find import find_any_version
    from slurmddp.launch.other_version import refuse_other_version

    if prometheus and (watch or as_json or time):
        raise UserError("--prometheus excludes --watch, --time and --json", todo="remove one of them")
    if time and watch:
        raise UserError("--time excludes --watch", todo="remove one of them")
    if output and not prometheus:
        raise UserError("-o needs --prometheus", todo="add --prometheus, or remove -o")
    folder = find_any_version(run, os.environ)
    refuse_other_version(folder)
    send_waiting([folder])
    found = _watch(folder, as_json=as_json) if watch else look(folder)
    if prometheus:
        _show_prometheus(found, output)
    elif time:
        _show_time(found, as_json=as_json)
    elif not (watch and as_json):
        typer.echo(_status_json(found) if as_json else join("\n", _status_lines(found, _ledger(found))))
    raise typer.Exit(found.state.exit_code)


def _show_time(found: "RunStatus", *, as_json: bool) -> None:
    from slurmddp.report.goodput import goodput_dict, goodput_text, never_submitted

    going, ledger = found.state.going, _ledger(found)
    if ledger is None:
        raise never_submitted(found.folder)
    if as_json:
        typer.echo(opt.json_text({"run_id": found.folder.id, **goodput_dict(ledger, going=going)}))
        return
    typer.echo(goodput_text(ledger, going=going))
    for note in found.notes:
        opt.say(f"note: {note}")


def _ledger(found: "RunStatus") -> "Ledger | None":
    from slurmddp.report.goodput import run_ledger

    return run_ledger(found.folder, going=found.state.going)


def _show_prometheus(found: "RunStatus", output: Path | None) -> None:
    from slurmddp.report.prometheus import prometheus_text
    from slurmddp.shared.files import write_whole

    text = prometheus_text(found, _ledger(found))
    if output:
        write_whole(output, text)
    else:
        typer.echo(text, nl=False)


def _status_json(found: "RunStatus") -> str:
    from slurmddp.report.gpus import read_gpus
    from slurmddp.report.scaling import find_scaling

    ledger, scaling = _ledger(found), find_scaling(found.folder, found.facts.events)
    more = {
        "recovered": ledger.recovered if ledger else 0,
        "scaling": scaling and scaling.as_dict(),
        "gpus": [gpu.as_dict() for gpu in read_gpus(found.folder, found.attempt)],
    }
    return opt.json_text({**found.as_dict(), **more})


def _status_lines(found: "RunStatus", ledger: "Ledger | None") -> list[str]:
    from slurmddp.report.goodput import goodput_line, recovered_line
    from slurmddp.report.gpus import gpus_line, read_gpus
    from slurmddp.report.scaling import find_scaling
    from slurmddp.report.status import status_lines

    scaling = find_scaling(found.folder, found.facts.events)
    gpus = gpus_line(read_gpus(found.folder, found.attempt)) if found.state.going else None
    return status_lines(found, goodput_line(ledger), recovered_line(ledger), scaling, gpus)


def _watch(folder: "RunFolder", *, as_json: bool) -> "RunStatus":
    """Show the status until the run is over or the user presses Ctrl-C; its last one."""
    import contextlib
    import sys

    from slurmddp.commands.terminal import Screen, shows_blocks
    from slurmddp.report.watch import clock_time, curves, watch_line

    on_screen = sys.stdout.isatty() and not as_json
    shown = ""
    first = latest = look(folder)
    with contextlib.suppress(KeyboardInterrupt), Screen() if on_screen else contextlib.nullcontext() as screen:
        for latest, asked in _looks(first):
            if screen is not None:
                if asked:  # what costs more than a look at the end of a file
                    ledger, more = _ledger(latest), curves(latest) if shows_blocks() else []
                screen.show([*_status_lines(latest, ledger), "", *more, f"{clock_time()}, Ctrl-C stops watching"])
            elif as_json:
                typer.echo(_status_json(latest))
            elif (line := watch_line(latest)) != shown:
                shown = line
                typer.echo(f"{clock_time()} {line}")
    return latest


def _looks(first: "RunStatus") -> "Iterator[tuple[RunStatus, bool]]":
    """Yield the status every two seconds until the run is over, and whether the scheduler was asked for it."""
    import time

    from slurmddp.report.logs import ASK_EVERY
    from slurmddp.report.status import refreshed

    found, asked = first, time.monotonic()
    yield found, True
    while found.state.going:
        time.sleep(LOOK_EVERY)
        again = time.monotonic() - asked >= ASK_EVERY
        if again:
            found, asked = look(first.folder), time.monotonic()
        else:
            found = refreshed(found)
        yield found, again


def logs(
    run: Run = LAST,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Follow the logs until the run is over")] = False,
    node: Annotated[str | None, typer.Option(metavar="NAME", help="Show only this node")] = None,
    attempt: Annotated[int | None, typer.Option(min=0, metavar="N", help="Show only this attempt")] = None,
    rank: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Show only the node of this rank, without lines of other ranks; only for jobs with train.task",
        ),
    ] = None,
    tail: Annotated[
        int | None, typer.Option("-n", "--tail", min=0, metavar="N", help="Start with the last N lines of each log")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object per line")] = False,
) -> None:
    """Show the logs of a run: job.sh first, then each node, attempt by attempt."""
    from slurmddp.launch.find import find_run
    from slurmddp.report.logs import Selection, follow_logs, select, show_logs

    folder = find_run(run, os.environ)
    follower = select(folder, Selection(node, attempt, rank, tail, as_json), follow=follow)
    send_waiting([folder])
    if follow:
        for line in follow_logs(follower, lambda: look(folder), opt.say):
            write_line(line)
    else:
        write_lines(show_logs(follower, lambda: look(folder), opt.say))


def confirm(run: str, folder: "RunFolder", action: str, *, yes: bool) -> None:
    """Name the run before something is done to it; ask if `last` means one that was not submitted from this folder.

    Raises UserError where nobody can be asked, or the answer is no.
    """
    import sys

    from slurmddp.errors import UserError
    from slurmddp.run import index

    opt.say(f"run     {folder.id}\nfolder  {folder.path}")
    if run != LAST or yes or index.is_here(folder):
        return
    todo = f"slurmddp {action} {folder.id}, or add --yes"
    what = f"the last run was submitted from another folder: {folder.id}"
    if not sys.stdin.isatty():
        raise UserError(what, where="last", todo=todo)
    if not typer.confirm(f"It was submitted from another folder: {action} it?", err=True):
        raise UserError(f"nothing was done: {what}", todo=todo)


def cancel(
    run: Run = LAST,
    now: Annotated[bool, typer.Option("--now", help="Cancel at once, with no time to save")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the job has exited")] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Cancel a run. A bundled task saves a checkpoint first; a script of your own has some time to save, then gets
    SIGTERM. The job is not requeued."""
    from slurmddp.launch.cancel import cancel_run, wait_until_over
    from slurmddp.launch.find import find_any_version
    from slurmddp.launch.other_version import cancel_other_version, wait_for_job
    from slurmddp.run.gate import own
    from slurmddp.run.manifest import other_version
    from slurmddp.run.next_commands import next_commands

    folder = own(find_any_version(run, os.environ), to="cancel it")
    confirm(run, folder, "cancel", yes=yes)
    older = other_version(folder)
    done = cancel_other_version(folder, now=now) if older else cancel_run(folder, now=now)
    if not as_json:
        typer.echo(done.text)
    end = None
    if wait:
        end = wait_for_job(folder) if older else wait_until_over(lambda: look(folder).state).line
    if as_json:
        jobs = [{"job_id": str(job_id), "action": action} for job_id, action in done.jobs]
        next_ = [] if older else next_commands(folder.id, look(folder).state.state)
        told = {"run_id": folder.id, "jobs": jobs, "text": done.text, "end": end, "next": next_}
        typer.echo(opt.json_text(told))
    elif end is not None:
        typer.echo(end)
