"""sweep submit, status, rerun, best: many runs of one job."""

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from slurmddp.commands import options as opt
from slurmddp.commands.help import App, Group
from slurmddp.commands.listed import BY_NAME
from slurmddp.commands.runs import Row, find_sweep, look_after, rows_of, told_cells
from slurmddp.commands.submit import dry_run_of
from slurmddp.commands.sweep.points import Planned, plan_sweep, prepare_rest, read_points, submit_points, submit_sweep
from slurmddp.errors import UserError
from slurmddp.job.resolve import Request
from slurmddp.records.events import keys_of, of
from slurmddp.records.rank_events import Evaluated
from slurmddp.report.plan import cost_line, workdir_text
from slurmddp.report.status import styled_state
from slurmddp.run.events import read_events
from slurmddp.run.layout import RunFolder
from slurmddp.run.metrics import behind
from slurmddp.run.state import EXIT_CODES
from slurmddp.run.sweeps import Sweep, own
from slurmddp.styled import columns, join, labelled
from slurmddp.visible import one_line

#: States of runs that `sweep rerun` submits again. Users cancel on purpose, and what was stopped can be resumed.
AGAIN = frozenset({"failed", "timed out", "node failure", "out of memory", "lost"})
_NOT_SUBMITTED = "not submitted"
#: Figures of an evaluation are events, not metrics: validation_loss is `loss` of `evaluated`.
_VALIDATION = "validation_"
_NO_METRICS = ("time", "attempt", "rank", "seconds", "step")


class PointRow(NamedTuple):
    """A point and its newest run; None before its submission."""

    name: str
    values: dict[str, str]
    row: Row | None

    @property
    def state(self) -> str:
        return self.row.told["state"] if self.row else _NOT_SUBMITTED

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "values": self.values, "state": self.state, "run": self.row and self.row.told}


class Ranked(NamedTuple):
    """A point's best value of a metric, and at which step it was."""

    point: PointRow
    value: float
    step: int | None


def _points(sweep: Sweep) -> list[PointRow]:
    """Return the sweep's points, asking each scheduler once."""
    newest = sweep.newest_runs()
    rows = {row.folder.path: row for row in rows_of(list(newest.values()), opt.say)}
    look_after(list(rows.values()))
    return [
        PointRow(name, dict(values), rows.get(newest[name].folder.path) if name in newest else None)
        for name, values in sweep.points.items()
    ]


def _to_rerun(points: Sequence[PointRow]) -> list[str]:
    """Return the names of the points that failed or were never submitted; say why others are left out."""
    for point in points:
        if point.row is not None and point.state in ("stopped", "cancelled"):
            command = "resume" if point.state == "stopped" else "rerun"
            opt.say(f"note: {point.name} is {point.state}: `slurmddp {command} {point.row.folder.id}` continues it")
        elif point.row is not None and point.state == _NOT_SUBMITTED:
            message = f"{point.name} may be in the queue, because sbatch did not answer: check squeue"
            opt.say(
                labelled("warning", f"{message}. If it is not there, remove {point.row.folder.path} and run this again")
            )
    return [point.name for point in points if point.state in AGAIN or point.row is None]


def _status_text(sweep: Sweep, points: Sequence[PointRow]) -> str:
    """Return a line per point, one more for the cause of a failure, and the counts of the states."""
    now = time.time()
    rows = [("POINT", *sweep.keys, "STATE", "STEP", "TIME", "RUN")]
    for point in points:
        state, step, took, run = "", "", "", ""
        if point.row:
            cells = told_cells(point.row.told, now)
            state, step, took, run = cells.state, cells.step, cells.took, point.row.folder.id
        rows.append((*_cells(sweep, point), state or styled_state(point.state), step, took, run))
    counts = Counter(point.state for point in points)
    most = f", at most {sweep.at_most} at once" if sweep.at_most else ""
    lines = [f"sweep  {sweep.id}: {len(points)} points{most}"]
    for line, each in zip(columns(rows), (None, *points), strict=True):
        lines.append(line)
        if each and each.row and (cause := each.row.told["cause"]):
            lines.append(f"  cause: {one_line(cause)}")
    lines.append(join(", ", (f"{count} " + styled_state(state) for state, count in sorted(counts.items()))))
    if any(point.state in AGAIN or point.row is None for point in points):
        lines.append(f"to repeat the points that failed: slurmddp sweep rerun {sweep.id}")
    return join("\n", lines)


def _rank(points: Sequence[PointRow], metric: str, *, largest: bool) -> list[Ranked]:
    """Return the points that have the metric, the best first. Raises UserError where none has it."""
    ranked, seen = [], set()
    for point in points:
        best: tuple[float, int | None] | None = None
        for name, value, step in _figures(point.row.folder) if point.row else ():
            seen.add(name)
            if name == metric and (best is None or (value > best[0] if largest else value < best[0])):
                best = value, step
        if best is not None:
            ranked.append(Ranked(point, *best))
    if not ranked:
        known = ", ".join(sorted(seen)) or "none yet"
        raise UserError(f"no point of the sweep has the metric {metric!r}", todo=f"metrics: {known}")
    return sorted(ranked, key=lambda each: each.value, reverse=largest)


def _cells(sweep: Sweep, point: PointRow) -> tuple[str, ...]:
    return (one_line(point.name), *(one_line(point.values.get(key, "")) for key in sweep.keys))


def _figures(folder: RunFolder) -> Iterator[tuple[str, float, int | None]]:
    """Yield name, value and step of each finite number in the metrics, and in the evaluations."""
    for rows, _ in behind(folder.metrics, 0):
        for row in rows:
            yield from _numbers("", row.figures, row.step)
    for _, evaluation in of(read_events(folder.events, folder.path).records, Evaluated):
        yield from _numbers(_VALIDATION, keys_of(evaluation), evaluation.step)


def _numbers(prefix: str, values: Mapping[str, Any], step: object) -> Iterator[tuple[str, float, int | None]]:
    for name, value in values.items():
        if type(value) in (int, float) and name not in _NO_METRICS and math.isfinite(value):
            yield prefix + name, value, step if type(step) is int else None


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
    grid: list[str] | None = opt.value(
        "KEY=VALUES", "Values of a key: 1e-3,3e-4 or 0..4; args.lr=... is --lr of a script"
    ),
    rows: Path | None = opt.value("FILE.csv", "A point per row; the first row has the keys"),
    at_most: int | None = opt.value("N", "Run at most N points at a time", min=1),
    dry_run: bool = opt.flag("--dry-run", "Check and list the points; write and submit nothing"),
    yes: bool = opt.flag("--yes", "Allow more than 1000 points"),
    as_json: opt.Json = False,
) -> None:
    """Submit a run for each point of a grid, or for each row of a table. All points are checked before the first is
    submitted."""
    points = read_points(grid or (), rows, many=yes)
    planned = plan_sweep(request, points, at_most)
    first = next(iter(planned.jobs.values()))
    opt.show_notes(first)
    places = {each.plan.workdir for each in planned.jobs.values()}
    if first.plan.program.own and len(planned.jobs) > len(places) and not any("{run}" in place for place in places):
        text = f"points share {', '.join(sorted(places))} (train.workdir): one may load or overwrite what another one"
        opt.say(labelled("warning", f"{text} saved; --workdir run gives each a folder of its own"))
    if dry_run:
        _show_dry_run(planned, as_json=as_json)
        return

    opt.say(f"sweep   {planned.sweep.id}")
    if first.plan.program.own:
        opt.say(f"in      {workdir_text(first.plan)}")
    opt.say(f"{cost_line(first.plan)}, for each of {len(points)} points")
    _finish(planned.sweep, submit_sweep(planned, quiet=as_json), as_json=as_json)


def _finish(sweep: Sweep, submitted: list[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        typer.echo(opt.json_text({"sweep": sweep.id, "folder": str(sweep.folder), "submitted": submitted}))
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


def status(sweep: SweepName = opt.LAST, as_json: opt.Json = False) -> None:
    """Show the state of each point. Exit code: 0 all done; 1 some failed, stopped or not submitted; 3 some still
    pending or running."""
    chosen = find_sweep(sweep)
    points = _points(chosen)
    facts = {"sweep": chosen.id, "folder": str(chosen.folder), "at_most": chosen.at_most}
    opt.show(as_json, {**facts, "points": [point.as_dict() for point in points]}, _status_text(chosen, points))
    codes = {EXIT_CODES[point.state] for point in points}
    raise typer.Exit(3 if 3 in codes else max(codes, default=0))


def rerun(
    sweep: SweepName = opt.LAST,
    dry_run: bool = opt.flag("--dry-run", "List the points; submit nothing"),
    as_json: opt.Json = False,
) -> None:
    """Submit the points that failed or were never submitted, from their start, with the code of the sweep."""
    chosen = own(find_sweep(sweep))
    names = _to_rerun(_points(chosen))
    if dry_run:
        opt.show(as_json, {"sweep": chosen.id, "points": names}, names)
        return
    if not names:
        opt.say("nothing to submit: no point has failed, and all were submitted")
    submitted = submit_points(chosen, prepare_rest(chosen, names), quiet=as_json) if names else []
    _finish(chosen, submitted, as_json=as_json)


def best(
    metric: str = opt.value("NAME", "A number in metrics.jsonl, or validation_NAME of the evaluations", default=...),
    sweep: SweepName = opt.LAST,
    largest: bool = opt.flag("--max", "The largest value is best, not the smallest"),
    as_json: opt.Json = False,
) -> None:
    """List the points by the best value of a metric in their newest run, the best first."""
    chosen = find_sweep(sweep)
    points = _points(chosen)
    ranked = _rank(points, metric, largest=largest)
    listed = [{**point.as_dict(), "value": value, "step": step} for point, value, step in ranked]
    rows = [("POINT", *chosen.keys, metric, "STEP", "STATE", "RUN")]
    for point, value, step in ranked:
        run, state = point.row.folder.id if point.row else "", styled_state(point.state)
        rows.append((*_cells(chosen, point), f"{value:.6g}", "" if step is None else str(step), state, run))
    opt.show(as_json, {"sweep": chosen.id, "metric": metric, "best": listed[0], "points": listed}, columns(rows))
    if missing := len(points) - len(ranked):
        opt.say(f"note: {missing} of {len(points)} points have no {metric} yet")


group = App(
    name="sweep",
    help=BY_NAME["sweep"].summary,
    epilog="Start here: slurmddp sweep job.yaml --grid train.seed=0..4",
    cls=_Group,
)
group.add(submit, example="slurmddp sweep job.yaml --grid args.lr=1e-3,3e-4 --at-most 2")
group.add(status, example="slurmddp sweep status last")
group.add(rerun, example="slurmddp sweep rerun last")
group.add(best, example="slurmddp sweep best last --metric validation_loss")
