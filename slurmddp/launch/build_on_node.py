"""What `build-image --on-node` asks Slurm for: by the site's profile, and what the user has configured for all jobs."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from slurmddp.cluster.base import JobId, JobView, Scheduler
from slurmddp.cluster.states import JobState
from slurmddp.errors import ExternalError, UserError
from slurmddp.images.process import StopSignals
from slurmddp.images.provenance import read_lock
from slurmddp.job.document import Document, read_file
from slurmddp.job.job import Job
from slurmddp.job.layers import Layered, merge
from slurmddp.job.resolve import environment_layer
from slurmddp.job.site import Partition, Site
from slurmddp.job.types import Line, Model, SbatchValue, slurm_time
from slurmddp.job.validate import validate
from slurmddp.launch.image import named_site
from slurmddp.sites.catalogue import config_files
from slurmddp.styled import labelled

HERE = "remove --on-node to build on this machine"
_HOUR = 3600


class _Resources(Model):
    partition: SbatchValue | None = None
    account: SbatchValue | None = None
    qos: SbatchValue | None = None


class _Layers(Model):
    """What of a job's layers holds for a build, too."""

    resources: _Resources = _Resources.model_construct()
    setup: tuple[Line, ...] = ()


class Asked(NamedTuple):
    """site: as the job names it, None where none is known; options: of sbatch; setup: lines for the node's shell."""

    site: str | None
    options: tuple[str, ...]
    setup: tuple[str, ...]


def ask(site: str | None, environment: Mapping[str, str]) -> Asked:
    """Return what to ask Slurm for. Raises UserError for a site without Slurm, or if a required setting is missing."""
    named = named_site(site, environment)
    if named is None:  # Slurm's own defaults
        return Asked(None, _sbatch_options(Site.model_construct(), _Resources.model_construct()), ())
    name, profile, layer = named
    if not profile.queues:
        raise UserError(f"site {profile.name} has no Slurm, so --on-node does not work", where="--on-node", todo=HERE)
    layers = _layers(layer, environment)
    options = _sbatch_options(profile, layers.resources)
    if "resources.account" in profile.required and not any(line.startswith(("--account", "-A")) for line in options):
        todo = "set resources.account in ~/.config/slurmddp/config.yaml, or export SLURMDDP_RESOURCES__ACCOUNT=NAME"
        raise UserError(
            f"site {profile.name} requires an account, but resources.account is not set", where="--on-node", todo=todo
        )
    return Asked(name, options, layers.setup)


def _layers(site_layer: Document, environment: Mapping[str, str]) -> _Layers:
    """Return the site's layer of the job, and the user's below a job file. Raises UserError."""
    configuration = [read_file(path, "configuration") for path in config_files(environment)]
    merged = merge(Job, [site_layer, *configuration, environment_layer(environment)])
    resources = merged.tree.get("resources") or {}
    if isinstance(resources, dict):
        resources = {key: resources[key] for key in _Resources.model_fields if key in resources}
    tree = {"resources": resources, "setup": merged.tree.get("setup") or []}
    return validate(_Layers, Layered(tree, merged.origins, {}))


def _sbatch_options(site: Site, defaults: _Resources) -> tuple[str, ...]:
    """Return the options for one task on one node, without GPUs, in this site's form."""
    settings, unsupported = site.images.on_node, set(site.unsupported_flags)
    name = settings.partition or defaults.partition
    partition = site.partitions.get(name or "", Partition.model_construct())
    form = dict(partition.ask) if partition.ask is not None else {"partition": name}
    # The QOS of jobs goes with their own partition.
    qos = form.get("qos") or (defaults.qos if settings.partition is None else None)
    time = settings.time or min(_HOUR, partition.max_time or _HOUR)
    options = [
        ("--nodes", "1"),
        ("--ntasks", "1"),
        ("--cpus-per-task", settings.cpus_per_node or site.images.processors),
        ("--mem", f"{settings.mem_per_node}M" if settings.mem_per_node else None),
        ("--time", slurm_time(time)),
        ("--partition", form.get("partition")),
        ("--account", settings.account or defaults.account),
        ("--qos", qos),
        ("--constraint", form.get("constraint")),
        # What the registry wants to know stands in the environment, and nowhere else.
        ("--export", "ALL"),
    ]
    left_out = unsupported | {extra.split("=")[0] for extra in settings.sbatch}
    lines = [f"{flag}={value}" for flag, value in options if value is not None and flag not in left_out]
    return (*lines, *(flag for flag in ("--no-requeue",) if flag not in left_out), *settings.sbatch)


#: Seconds between two looks at the log, and between two questions to Slurm, which have time: the log tells of the end.
LOOK_EVERY = 0.3
ASK_EVERY = 5.0
#: Seconds that a shared file system may take to show what a node has written.
LATE = 20.0
#: Seconds that a cancelled job is waited for: Slurm's KillWait is 30 s where nobody has changed it.
CANCEL_WAIT = 60.0
_SHARED = "put the image in a folder that the nodes and this machine share"


class BuildJob(NamedTuple):
    """A submitted build. log: the job's output, whose last line the script writes; target: the image."""

    scheduler: Scheduler
    id: JobId
    log: Path
    target: Path


def follow(job: BuildJob, report: Callable[[str], None], stop: StopSignals) -> UserError | ExternalError | None:
    """Give the log's lines to `report` until the job is over; the error that its end is, exit code 2 or 1, or None.

    Raises Stopped, UserError and ExternalError while the job continues.
    """
    log = _Log(job.log)
    watch = _Watch(job, report, stop)
    while True:
        stop.check()
        for line in log.new_lines():
            report(line)
        if log.code is not None and log.code < 128:
            return _end_of(job, log.code)
        # One that was ended by a signal: Slurm knows why.
        if watch.is_over(at_once=log.code is not None, empty=log.empty):
            return _verdict(job, watch.view, log)
        time.sleep(LOOK_EVERY)


def end(job: BuildJob, report: Callable[[str], None]) -> None:
    """Cancel the job and wait until it is over. Never raises: something has gone wrong already."""

    def tell(text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal may be what has gone
            report(text)

    tell(f"cancelling job {job.id}")
    deadline = time.monotonic() + CANCEL_WAIT
    is_cancelled = False
    while time.monotonic() < deadline:
        try:
            if not is_cancelled:
                job.scheduler.cancel(job.id)
                is_cancelled = True
            view = job.scheduler.job(job.id)
            if view is None or view.state.over:
                return
        except (ExternalError, UserError):
            pass  # busy, or ended by the terminal's second ctrl-C: once more
        time.sleep(0.5)
    tell(labelled("warning", f"job {job.id} is still running: check squeue, and cancel it with `scancel {job.id.id}`"))


class _Log:
    """The log: its new whole lines, and the exit code that its last line tells. empty: nothing has come of it yet."""

    def __init__(self, path: Path) -> None:
        self.code: int | None = None
        self.empty = True
        self._path = path
        self._offset = 0

    def new_lines(self) -> Iterator[str]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return  # not there yet, or not now: a file system that is slow
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        self.empty = self.empty and not whole
        last = f"{self._path}: exit code "
        for line in data[:whole].decode("utf-8", "replace").splitlines():
            if line.startswith(last) and line.removeprefix(last).isdecimal():
                self.code = int(line.removeprefix(last))
            else:
                yield line


class _Watch:
    """Slurm's state of the job, asked now and then; changes are printed."""

    def __init__(self, job: BuildJob, report: Callable[[str], None], stop: StopSignals) -> None:
        self.view: JobView | None = None
        self._job, self._report, self._stop = job, report, stop
        self._next = 0.0
        self._told = ""
        self._over_since: float | None = None

    def is_over(self, *, at_once: bool, empty: bool) -> bool:
        """Return whether the job is over and its log had time to appear (`at_once`: do not wait for the log)."""
        now = time.monotonic()
        if self._over_since is not None:
            return at_once or now - self._over_since >= LATE
        if now >= self._next:
            self._next = now + (1.0 if at_once else ASK_EVERY)
            self._ask()
        return False

    def _ask(self) -> None:
        try:
            self.view = view = self._job.scheduler.job(self._job.id)
        except ExternalError as error:
            self._stop.check()  # ctrl-C in a terminal ends this small command, too
            self._tell(f"note: {error}")  # the job continues, whether the controller answers or not
            return
        if view is None or view.state.over:
            self._over_since = time.monotonic()
        elif view.state is JobState.PENDING:
            self._tell(f"job {self._job.id} is pending" + (f" ({view.reason})" if view.reason else ""))
        elif view.state is JobState.RUNNING:
            self._tell(f"job {self._job.id} runs on {view.nodes}")

    def _tell(self, text: str) -> None:
        if text != self._told:
            self._report(text)
        self._told = text


def _end_of(job: BuildJob, code: int) -> UserError | ExternalError | None:
    """Return the error of a build that failed, or whose image is not visible here."""
    if code == 2:
        return UserError(f"job {job.id} refused to build the image", todo="see the lines above")
    if code != 0:
        return ExternalError(f"job {job.id} failed to build the image (exit code {code}): see the lines above")
    deadline = time.monotonic() + LATE
    while read_lock(job.target) is None:
        if time.monotonic() >= deadline:
            return UserError(
                f"job {job.id} built the image, but {job.target} is not visible on this machine", todo=_SHARED
            )
        time.sleep(LOOK_EVERY)
    return None


def _verdict(job: BuildJob, view: JobView | None, log: _Log) -> UserError | ExternalError:
    """Return why a job ended before its script did, as Slurm reports it."""
    if view is None:
        return ExternalError(f"Slurm no longer knows job {job.id}, and its log does not show how the build ended")
    if log.empty and view.state in (JobState.COMPLETED, JobState.FAILED):
        return UserError(
            f"job {job.id} finished, but this machine sees none of its files in {job.log.parent}", todo=_SHARED
        )
    where = f" on {view.nodes}" if view.nodes else ""
    more = "set a larger images.on_node.{} in the site profile"
    reason, todo = {
        JobState.TIMED_OUT: ("reached its time limit", more.format("time")),
        JobState.OUT_OF_MEMORY: ("ran out of memory", more.format("mem_per_node")),
        JobState.CANCELLED: ("was cancelled", ""),
        JobState.PREEMPTED: ("was preempted", "try again, or set another images.on_node.partition"),
        JobState.NODE_FAILED: ("lost its node", "try again"),
    }.get(view.state, (f"ended in state {view.word}", ""))
    return ExternalError(f"job {job.id} {reason}{where}: no image was made" + (f"\n  -> {todo}" if todo else ""))
