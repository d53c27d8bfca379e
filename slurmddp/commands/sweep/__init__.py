"""sweep submit, status, rerun, best: many runs of one job."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from slurmddp.commands import options as opt
from slurmddp.commands.help import App, Group
from slurmddp.commands.listed import BY_NAME
from slurmddp.commands.options import Json
from slurmddp.commands.run_options import LAST
from slurmddp.commands.runs import find_sweep, look_after
from slurmddp.commands.submit import dry_run_of
from slurmddp.commands.sweep.points import Planned, plan_sweep, prepare_rest, read_points, submit_points, submit_sweep
from slurmddp.commands.sweep.table import PointRow, exit_code, point_rows, rank, rank_text, status_text, to_rerun
from slurmddp.commands.terminal import Progress
from slurmddp.job.resolve import Request
from slurmddp.launch.submit import Handed
from slurmddp.report.plan import cost_line, workdir_text
from slurmddp.run.sweeps import Sweep, own
from slurmddp.styled import labelled

SweepName = Annotated[
    str, typer.Argument(metavar="SWEEP", help="Sweep id (or its first characters), its folder, or last")
]


class _Group(Group):
    """`slurmddp sweep JOB.yaml` is `slurmddp sweep submit JOB.yaml`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the name of the command in front where none stands."""
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["submit", *args]
        return super().parse_args(ctx, args)


@opt.job_command()
def submit(
    request: Request,
    grid: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUES", help="Values of a key: 1e-3,3e-4 or 0..4; args.lr=... is --lr of a script"),
    ] = None,
    rows: Annotated[
        Path | None, typer.Option(metavar="FILE.csv", help="A point per row; the first row has the keys")
    ] = None,
    at_most: Annotated[int | None, typer.Option(min=1, metavar="N", help="Run at most N points at a time")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and list the points; write and submit nothing")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Allow more than 1000 points")] = False,
    as_json: Json = False,
) -> None:
    """Submit a run for each point of a grid, or for each row of a table. All points are checked before the first is
    submitted."""
    points = read_points(grid or (), rows, many=yes)
    planned = plan_sweep(request, points, at_most)
    first = next(iter(planned.jobs.values()))
    opt.show_notes(first)
    places = {each.plan.workdir for each in planned.jobs.values()}
    if first.plan.program.own and len(planned.jobs) > len(places) and not any("{run}" in place for place in places):
        what = f"points share {', '.join(sorted(places))} (train.workdir): one may load or overwrite what another one"
        opt.say(labelled("warning", f"{what} saved; --workdir run gives each a folder of its own"))
    if dry_run:
        _show_dry_run(planned, as_json=as_json)
        return

    opt.say(f"sweep   {planned.sweep.id}")
    if first.plan.program.own:
        opt.say(f"in      {workdir_text(first.plan)}")
    opt.say(f"{cost_line(first.plan)}, for each of {len(points)} points")
    told = _Told(quiet=as_json)
    with Progress() as progress:
        submit_sweep(planned, told, progress.tell)
    _finish(planned.sweep, told, as_json=as_json)


class _Told:
    """Prints each submission as it is made, and keeps it."""

    def __init__(self, *, quiet: bool) -> None:
        self.quiet = quiet
        self.submitted: dict[str, Handed] = {}
        self.warn = functools.cache(lambda text: opt.say(labelled("warning", text)))  # once for all points

    def __call__(self, name: str, handed: Handed) -> None:
        self.submitted[name] = handed
        for warning in handed.warnings:
            self.warn(warning)
        if not self.quiet:
            typer.echo(f"run     {handed.run_id}  job {handed.job_id}")


def _finish(sweep: Sweep, told: _Told, *, as_json: bool) -> None:
    if as_json:
        runs = [{"name": name, **handed.as_dict()} for name, handed in told.submitted.items()]
        typer.echo(opt.json_text({"sweep": sweep.id, "folder": str(sweep.folder), "submitted": runs}))
    else:
        opt.say(f"to follow: slurmddp sweep status {sweep.id}")


def _show_dry_run(planned: Planned, *, as_json: bool) -> None:
    first = next(iter(planned.jobs.values()))
    shown = dry_run_of(first)
    if shown.refusals:
        raise shown.refusals[0]
    for warning in shown.warnings:
        opt.say(labelled("warning", warning))
    if as_json:
        points = [{"name": name, "values": dict(values)} for name, values in planned.sweep.points.items()]
        typer.echo(opt.json_text({"points": points, "at_most": planned.sweep.at_most, "first": shown.as_dict()}))
        return
    for name, values in planned.sweep.points.items():
        typer.echo("  ".join([name, *(f"{key}={value}" for key, value in values.items())]))
    typer.echo(f"\nthe first of {len(planned.jobs)}:")
    typer.echo(shown.summary())


def _points(sweep: Sweep) -> list[PointRow]:
    points = point_rows(sweep, opt.say)
    look_after([point.row for point in points if point.row])
    return points


def status(sweep: SweepName = LAST, as_json: Json = False) -> None:
    """Show the state of each point. Exit code: 0 all done; 1 some failed, stopped or not submitted; 3 some still
    pending or running."""
    found = find_sweep(sweep)
    points = _points(found)
    if as_json:
        told = {"sweep": found.id, "folder": str(found.folder), "at_most": found.at_most}
        typer.echo(opt.json_text({**told, "points": [point.as_dict() for point in points]}))
    else:
        typer.echo(status_text(found, points))
    raise typer.Exit(exit_code(points))


def rerun(
    sweep: SweepName = LAST,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the points; submit nothing")] = False,
    as_json: Json = False,
) -> None:
    """Submit the points that failed or were never submitted, from their start, with the code of the sweep."""
    found = own(find_sweep(sweep))
    names = to_rerun(_points(found), opt.say)
    told = _Told(quiet=as_json)
    if dry_run:
        typer.echo(opt.json_text({"sweep": found.id, "points": list(names)}) if as_json else "\n".join(names))
        return
    if names:
        jobs = prepare_rest(found, names, os.environ, functools.cache(opt.say))
        with Progress() as progress:
            submit_points(found, jobs, told, progress.tell)
    else:
        opt.say("nothing to submit: no point has failed, and all were submitted")
    _finish(found, told, as_json=as_json)


def best(
    metric: Annotated[
        str, typer.Option(metavar="NAME", help="A number in metrics.jsonl, or validation_NAME of the evaluations")
    ],
    sweep: SweepName = LAST,
    largest: Annotated[bool, typer.Option("--max", help="The largest value is best, not the smallest")] = False,
    as_json: Json = False,
) -> None:
    """List the points by the best value of a metric in their newest run, the best first."""
    found = find_sweep(sweep)
    points = _points(found)
    ranked = rank(points, metric, largest=largest)
    if as_json:
        told = [{**point.as_dict(), "value": value, "step": step} for point, value, step in ranked]
        typer.echo(opt.json_text({"sweep": found.id, "metric": metric, "best": told[0], "points": told}))
    else:
        typer.echo(rank_text(found, metric, ranked))
    if missing := len(points) - len(ranked):
        opt.say(f"note: {missing} of {len(points)} points have no {metric} yet")


group = App(
    name="sweep",
    help=BY_NAME["sweep"].summary,
    epilog="Start here: slurmddp sweep job.yaml --grid train.seed=0..4",
    cls=_Group,
)
group.add(submit, example="slurmddp sweep job.yaml --grid train.optimizer.lr=1e-3,3e-4 --at-most 2")
group.add(status, example="slurmddp sweep status last")
group.add(rerun, example="slurmddp sweep rerun last")
group.add(best, example="slurmddp sweep best last --metric validation_loss")
