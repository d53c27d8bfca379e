"""What runs on each rank, what it runs in, and the job as the runtime reads it."""

import os.path
from typing import Any

from slurmddp.container import Bind, Container, NoContainer, runtime_named
from slurmddp.errors import UserError
from slurmddp.job.document import RUN
from slurmddp.job.expand import begins_open
from slurmddp.job.job import Job
from slurmddp.job.plan.model import BatchPlan, Context, Layout, Program
from slurmddp.job.resolve import Resolved
from slurmddp.job.types import WORKDIRS
from slurmddp.shared import schemas


def absolute(path: str, cwd: str) -> str:
    """A path as seen from the folder of submission; one that begins with an unset variable stays as written."""
    return path if begins_open(path) else os.path.normpath(os.path.join(cwd, path))


def plan_program(job: Job, context: Context) -> Program:
    """A script runs from the run folder's snapshot, or from where it lies where `snapshot` is false."""
    train = job.train
    project = absolute(train.project, context.cwd) if train.project else None
    if train.script is None:
        path = () if project is None else ("code/project",) if job.snapshot else (project,)
        return Program("", True, train.args, project, path, train.module or "")
    script = absolute(train.script, context.cwd)
    folder = os.path.dirname(script)
    project = project or folder
    if not job.snapshot:
        return Program(script, False, train.args, None, (project,))
    inside = os.path.relpath(script, project)
    if inside.split("/")[0] == "..":
        todo = "set train.project to a folder that contains it"
        raise UserError(f"the script {script} is outside of train.project {project}", todo=todo)
    return Program(f"code/project/{inside}", True, train.args, project, ("code/project",))


def plan_workdir(job: Job, program: Program, context: Context) -> str:
    """Return where the ranks' command runs, which may begin with {run}; empty for the run folder itself."""
    if not program.own:
        return context.cwd if program.project else ""
    workdir = job.train.workdir or "submit"
    if workdir in WORKDIRS:
        return context.cwd if workdir == "submit" else f"{RUN}/work"
    return absolute_workdir(workdir, context.cwd)


def absolute_workdir(wanted: str, cwd: str) -> str:
    """Return train.workdir with its path absolute; `submit`, `run` and what begins with {run} stay."""
    if wanted in WORKDIRS:
        return wanted
    return os.path.normpath(wanted) if wanted.startswith(RUN) else absolute(wanted, cwd)


def plan_watch(job: Job, program: Program, workdir: str) -> tuple[str, ...]:
    """Return the paths of checkpoint.watch as the ranks see them; each may begin with {run}."""
    if not program.own:
        return ()
    return tuple(path if path.startswith(RUN) else absolute(path, workdir) for path in job.checkpoint.watch)


def plan_accelerate(resolved: Resolved, context: Context) -> str | None:
    """The config file of `launch.accelerate`, absolute. Raises UserError with the bundled entrypoint."""
    path = resolved.job.launch.accelerate
    if path is not None and resolved.job.train.task is not None:
        raise UserError(
            "launch.accelerate is for your own script: train.task does not use Accelerate",
            where=resolved.location("launch", "accelerate"),
            todo="remove it; train.precision and parallel.shard set precision and FSDP of a task",
        )
    return None if path is None else absolute(path, context.cwd)


def check_image(resolved: Resolved) -> None:
    """Raise UserError where an image is needed, and none is named or it is not a file."""
    container, where = resolved.job.container, resolved.location("container", "image")
    if not container.needs_image:
        return
    if container.image is None:
        raise UserError(
            "container.image is not set: the ranks need an image, or a Python environment",
            where=where,
            todo="with an image: slurmddp build-image image.sif --recipe ngc-pytorch, then --image image.sif\n"
            "  -> with an environment that has torch: activate it before you submit, or --venv DIR, or --conda NAME",
        )
    if "://" in container.image:
        todo = f"build a .sif from it first: slurmddp build-image image.sif --base {container.image}"
        raise UserError(
            f"container.image is {container.image}, which every node would have to download", where=where, todo=todo
        )


def plan_container(resolved: Resolved, layout: Layout, program: Program, context: Context) -> Container:
    """Return how the ranks' container starts; `check_image` has seen that there is an image where one is needed."""
    settings = resolved.job.container
    if not settings.needs_image or settings.image is None:
        by_setup = not resolved.site.queues and not settings.python  # slurmddp's own Python, where setup brings none
        python = context.python if by_setup else settings.python or "python3"
        return NoContainer(python, python_of_setup=by_setup and bool(resolved.job.setup))
    kind = runtime_named(settings.runtime)
    device = kind.devices.get(resolved.site.gpu_vendor) if layout.gpus_per_node else None
    container = kind(
        python=settings.python or "python3",
        image=absolute(settings.image, context.cwd),
        options=(*filter(None, [device]), *settings.options),
        binds=_binds(resolved, program, context),
    )
    return container._replace(compat=settings.compat and container.gpu_vendor == "nvidia")


def data_paths(job: Job, context: Context) -> tuple[str, ...]:
    """The dataset's paths as the ranks see them, absolute."""
    path = job.train.data.get("path") if job.train.task else None
    listed = path if isinstance(path, list) else [path]
    return tuple(absolute(item, context.cwd) for item in listed if isinstance(item, str) and item)


def host_path(path: str, binds: tuple[Bind, ...]) -> str:
    """Return where a path of the container lies on the host: through the bind with the longest destination above it."""
    above = [bind for bind in binds if _is_below(path, bind.destination)]
    best = max(above, key=lambda bind: len(bind.destination), default=None)
    return path if best is None else best.source + path[len(best.destination.rstrip("/")) :]


def _binds(resolved: Resolved, program: Program, context: Context) -> tuple[Bind, ...]:
    """The binds that were asked for, and those that follow: dataset, older checkpoints, a script's own folders."""
    job = resolved.job
    binds: list[Bind] = []
    for index, bind in enumerate(job.container.binds):
        source = absolute(bind.source, context.cwd)
        origin = resolved.layered.origins.get(("container", "binds", str(index)))
        by_site = origin is not None and origin.layer.startswith("site ")
        binds.append(Bind(source, bind.destination or source, bind.mode, by_site))
    read_only = [*data_paths(job, context), *context.resume_from]
    if job.train.task and job.train.init_from:
        read_only.append(absolute(job.train.init_from, context.cwd))
    read_only += [path for path in program.python_path if os.path.isabs(path)]
    implied = [Bind(path, path, "ro") for path in read_only if not begins_open(path)]
    if program.own or program.project:
        folders = dict.fromkeys((context.cwd, plan_workdir(job, program, context)))
        implied += [Bind(path, path, "rw") for path in folders if path.startswith("/")]
    given = tuple(binds)
    for new in implied:
        above = given if new.mode == "rw" else binds  # code that runs in place may be where the script writes
        if not any(_is_below(new.destination, bind.destination) for bind in above):
            hidden = [bind for bind in binds[len(given) :] if _is_below(bind.destination, new.destination)]
            binds = [bind for bind in binds if bind not in hidden] + [new]
    places = [Bind(path, path, "rw") for path in (job.paths.cache, job.paths.node) if path]
    for made in (*binds, *places):
        if any(char in made.source + made.destination for char in ':,"\\'):
            todo = "rename it, or link to it"
            raise UserError(f"the path {made.source!r} contains a character that --bind does not accept", todo=todo)
    # A resolved job holds the site's binds as well: the same one twice is one.
    unique: dict[str, Bind] = {}
    for made in binds:
        unique.setdefault(made.spec, made)
    return tuple(unique.values())


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def runtime_job(job: Job, batch: BatchPlan, context: Context) -> dict[str, Any]:
    """job.json, all but the run's id: what `slurmddp.runtime.train` reads on the ranks."""
    train = job.train
    data = dict(train.data)
    paths = data_paths(job, context)
    if paths:
        data["path"] = list(paths) if isinstance(data["path"], list) else paths[0]
    of_scripts = {"script", "module", "args", "resume_args", "observe", "project", "workdir"}
    given = train.model_dump(mode="json", exclude={*of_scripts, "batch"})
    init_from = absolute(train.init_from, context.cwd) if train.init_from else None
    checkpoint = job.checkpoint.model_dump(mode="json", exclude={"watch"})
    return {
        "schema": schemas.JOB,
        "train": {**given, "data": data, "init_from": init_from},
        "parallel": job.parallel.model_dump(mode="json"),
        "batch": {
            "global": batch.total,
            "micro": batch.micro,
            "weights": dict(train.batch.weights),
            "by_length": train.batch.by_length,
        },
        "checkpoint": {"every_seconds": checkpoint.pop("interval"), **checkpoint},
        "resume_from": list(context.resume_from),
        "timeouts": {"collective": job.timeouts.collective, "hang": job.timeouts.hang},
    }
