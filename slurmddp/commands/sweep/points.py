"""`slurmddp sweep`: one run for each point of a grid, or for each row of a table."""

import csv
import functools
import itertools
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import typer

from slurmddp.commands import options as opt
from slurmddp.commands.rerun import prepare_again
from slurmddp.commands.terminal import Progress
from slurmddp.errors import ExternalError, UserError
from slurmddp.job.resolve import Request
from slurmddp.launch.job_check.cluster import Cluster
from slurmddp.launch.prepare import Prepared, prepare
from slurmddp.launch.problems import refuse_problems
from slurmddp.launch.submit import submit
from slurmddp.render.documents import job_yaml
from slurmddp.run import sweeps
from slurmddp.run.create import new_id
from slurmddp.run.gate import own
from slurmddp.run.sweeps import OwnSweep, Sweep
from slurmddp.styled import labelled

#: More points than this need --yes.
MANY = 1000
#: Keys below this go to an own script: args.lr=1 becomes --lr=1.
ARGS = "args."
#: Key, value, and how the user wrote it.
Option = tuple[str, object, str]
_RANGE = re.compile(r"(-?[0-9]{1,15})\.\.(-?[0-9]{1,15})")
#: Keys that the sweep sets itself, or that must be the same for all points.
_OURS = ("name", "site", "paths.runs", "resources.sbatch_extra")


class Point(NamedTuple):
    """Values by key, and where the user wrote them."""

    where: str
    values: dict[str, str]

    @property
    def label(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.values.items())


class Planned(NamedTuple):
    """A sweep of which nothing is written yet: its jobs are checked, in the order of its points."""

    sweep: Sweep
    jobs: dict[str, Prepared]


def read_points(grids: Sequence[str], rows: Path | None, *, many: bool) -> list[Point]:
    """Return the points of --grid or --rows. Raises UserError."""
    if bool(grids) == (rows is not None):
        todo = "for example --grid train.optimizer.lr=1e-3,3e-4 --grid train.seed=0..4"
        raise UserError("a sweep needs either --grid or --rows", todo=todo)
    points = list(_table(rows, many)) if rows is not None else _grid(grids, many)
    if not points:
        raise UserError("has no rows below its header, so the sweep has no points", where=str(rows))
    first: dict[tuple[tuple[str, str], ...], Point] = {}
    for point in points:
        other = first.setdefault(tuple(point.values.items()), point)
        if other is not point:
            same = f"{other.where} and {point.where}" if rows else "two points"
            raise UserError(f"{same} are the same: {point.label}", todo="remove one of the two")
    return points


def _grid(grids: Sequence[str], many: bool) -> list[Point]:
    axes: dict[str, Sequence[str]] = {}
    for text in grids:
        key, equals, values = text.partition("=")
        if not equals:
            raise UserError(f"--grid {text!r} is not KEY=VALUES", todo="for example --grid train.seed=0..4")
        _check_key(key, f"--grid {text}", axes)
        axes[key] = _values(values, f"--grid {text}")
    _refuse_many(math.prod(map(len, axes.values())), many)
    return [Point("--grid", dict(zip(axes, each, strict=True))) for each in itertools.product(*axes.values())]


def _values(text: str, where: str) -> list[str]:
    """Return the values of `1,2`, `0..4`, or `"[a,b]",c`: a value with a comma stands in double quotes, as in CSV."""
    listed: list[str] = []
    for value in map(str.strip, next(csv.reader([text], skipinitialspace=True)) or [""]):
        if not value:
            raise UserError("has an empty value", where=where, todo="remove the comma, or write the value")
        if (bounds := _RANGE.fullmatch(value)) is None:
            listed.append(value)
            continue
        low, high = map(int, bounds.groups())
        if not 0 <= high - low < 10**6:
            raise UserError(f"has the range {value}, which has no or too many values", where=where, todo="write 0..4")
        listed += map(str, range(low, high + 1))
    return listed


def _table(path: Path, many: bool) -> Iterator[Point]:
    """Yield a point for each row of a CSV file; an empty cell sets nothing."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            lines = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if row]
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=str(path)) from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"is not a CSV file in UTF-8: {error}", where=str(path)) from None
    if not lines:
        raise UserError("is empty", where=str(path), todo="write the keys into the first line, and a point per line")
    (number, header), rows = lines[0], lines[1:]
    keys: list[str] = []
    for key in header:
        _check_key(key, f"{path}:{number}", keys)
        keys.append(key)
    _refuse_many(len(rows), many)
    for column, key in enumerate(keys):
        if rows and not any(len(cells) > column and cells[column] for _, cells in rows):
            todo = "remove the column, or fill it"
            raise UserError(f"no row has a value for the column {key}", where=str(path), todo=todo)
    for number, cells in rows:
        if len(cells) > len(keys):
            raise UserError(f"has {len(cells)} cells for {len(keys)} keys", where=f"{path}:{number}")
        values = {key: cell for key, cell in zip(keys, cells, strict=False) if cell}
        if not values:
            raise UserError("has only empty cells", where=f"{path}:{number}", todo="remove the row, or fill a cell")
        yield Point(f"{path}:{number}", values)


def _check_key(key: str, where: str, known: Iterable[str]) -> None:
    """Raise UserError for a key that no sweep can have. `prepare` finds those that no job has."""
    if not key or key == ARGS:
        raise UserError("has an empty key", where=where, todo="name a key of the job file, or args.OPTION")
    if key in known:
        raise UserError(f"names {key} twice", where=where, todo="remove one")
    if key in _OURS:
        raise UserError(f"{key} cannot differ between the points of a sweep", where=where, todo="remove it")


def _refuse_many(count: int, many: bool) -> None:
    if count > MANY and not many:
        raise UserError(f"the sweep has {count} points, more than {MANY}", todo="to submit all of them, add --yes")


def plan_sweep(request: Request, points: Sequence[Point], at_most: int | None) -> Planned:
    """Prepare and check the job of every point. Writes nothing. Raises UserError."""
    cluster = Cluster()  # Slurm is asked once for all points
    first = prepare(request.adding(*_options(points[0])), cluster=cluster)
    plan, job = first.plan, first.resolved.job
    if not plan.site.queues and (at_most or 0) < len(points):
        raise UserError(
            f"site {plan.site.name} has no queue, so all {len(points)} points would start at once",
            todo=f"choose a site with Slurm, or pass --at-most {len(points)} to start them all",
        )
    extra = job.resources.sbatch_extra
    if at_most and any(each.split("=")[0] == "--dependency" for each in extra):
        where = first.resolved.location("resources", "sbatch_extra")
        raise UserError("--at-most cannot be combined with --dependency", where=where, todo="remove one of the two")
    root = Path(plan.runs_root)
    folder = root / new_id(plan.job.name)
    width = len(str(len(points)))
    names = [f"{plan.job.name}-{number:0{width}d}" for number in range(1, len(points) + 1)]
    jobs: dict[str, Prepared] = {}
    for index, (name, point) in enumerate(zip(names, points, strict=True)):
        ours: list[Option] = [("name", name, "sweep"), ("paths.runs", str(folder).replace("$", "$$"), "sweep")]
        if plan.program.own and job.train.workdir is None and "train.workdir" not in point.values:
            ours.append(("train.workdir", "run", "sweep"))  # or a point would load the checkpoint of another
        if at_most and plan.site.queues:
            # Of all jobs of one name, Slurm runs one at a time, also after a requeue, a cancel or a rerun. So each of
            # these names is a queue of its own.
            queue = [f"--job-name={folder.name}-{index % at_most + 1}", "--dependency=singleton"]
            ours.append(("resources.sbatch_extra", [*extra, *queue], "--at-most"))
        try:
            jobs[name] = prepare(request.adding(*_options(point, job.train.args), *ours), cluster=cluster)
            refuse_problems(jobs[name])
        except UserError as error:
            raise UserError(f"point {index + 1} of {len(points)} ({point.label}): {error}") from None
    return Planned(Sweep(folder, {name: p.values for name, p in zip(names, points, strict=True)}, at_most), jobs)


def _options(point: Point, args: Sequence[str] | None = None) -> list[Option]:
    """Return the point's values as options. args: those that the script gets at every point; None: not known yet."""
    options: list[Option] = [
        (key, value, point.where) for key, value in point.values.items() if not key.startswith(ARGS)
    ]
    own = [f"--{key.removeprefix(ARGS)}={value}" for key, value in point.values.items() if key.startswith(ARGS)]
    if own and "train.args" in point.values:
        raise UserError("sets train.args and args.OPTION; choose one", where=point.where)
    return [*options, ("train.args", [*args, *own], point.where)] if own and args is not None else options


def submit_sweep(planned: Planned, *, quiet: bool) -> list[dict[str, Any]]:
    """Write the sweep's folder and submit its points, as `submit_points` does. Raises UserError, ExternalError."""
    sweep, jobs = planned
    texts = {name: job_yaml(each.resolved, each.plan) for name, each in jobs.items()}
    try:
        sweeps.write(sweep, texts, next(iter(jobs.values())).plan.job.paths.permissions)
        return submit_points(sweep, jobs, quiet=quiet)
    finally:
        if not sweep.newest_runs():  # no disk space, or Slurm has refused the first: nothing stays
            shutil.rmtree(sweep.folder, ignore_errors=True)


def submit_points(sweep: Sweep, jobs: Mapping[str, Prepared], *, quiet: bool) -> list[dict[str, Any]]:
    """Submit these points in their order, and print each unless `quiet`. Return them for --json.

    Raises the first refusal, which names what was submitted.
    """
    environment = dict(os.environ)
    warn = functools.cache(lambda text: opt.say(labelled("warning", text)))  # once for all points
    submitted: list[dict[str, Any]] = []
    with Progress() as progress:
        for name, prepared in jobs.items():
            progress.tell(f"submitting {name}, {len(submitted) + 1} of {len(jobs)}")
            os.environ.update(environment)  # `submit` removes the secrets, and the next point needs them, too
            try:
                submission = submit(prepared)
            except (UserError, ExternalError) as error:
                outcome = "was not submitted" if isinstance(error, UserError) else "may not have been submitted"
                todo = f"\n  -> `slurmddp sweep rerun {sweep.id}` submits the rest" if sweep.newest_runs() else ""
                before = ", ".join(point["name"] for point in submitted) or "nothing"
                raise type(error)(f"{name} {outcome} (submitted before it: {before}): {error}{todo}") from None
            submitted.append({"name": name, **submission.as_dict()})
            for warning in submission.warnings:
                warn(warning)
            if not quiet:
                typer.echo(f"run     {submission.run_id}  job {submission.job_id}")
    return submitted


def prepare_rest(sweep: OwnSweep, names: Iterable[str]) -> dict[str, Prepared]:
    """Prepare these points again, with the code and the configuration of the sweep. Raises UserError."""
    runs = sweep.newest_runs()
    if not runs:
        raise UserError(f"sweep {sweep.id} has no run from which its code could be taken", todo="submit it again")
    jobs = {}
    say = functools.cache(opt.say)  # once for all points
    for name in names:
        known = runs.get(name)
        source = own((known or next(iter(runs.values()))).folder, to="run its code")
        jobs[name] = prepare_again(source, say, None if known else sweep.job_yaml(name))
        refuse_problems(jobs[name])
    return jobs
