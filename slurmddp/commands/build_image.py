"""build-image: build an image here or, with --on-node, in a batch job that is submitted, followed and ended here."""

import contextlib
import os
import re
import secrets
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import typer

from slurmddp.cluster.base import JobId
from slurmddp.cluster.client import Slurm
from slurmddp.commands import options as opt
from slurmddp.commands.terminal import Progress
from slurmddp.errors import ExternalError, UserError
from slurmddp.images.build_lock import holder
from slurmddp.images.inventory import left_over, remove
from slurmddp.images.make import Request, decide, preview
from slurmddp.images.make import build_image as build
from slurmddp.images.process import StopSignals
from slurmddp.images.provenance import writing
from slurmddp.launch.build_on_node import HERE, Asked, BuildJob, ask, end, follow
from slurmddp.launch.image import commit_of, image_of_job, rules_of, wanted_image
from slurmddp.render.engine import render
from slurmddp.styled import exact

_SCRIPT = "build.sh"


@dataclass(frozen=True)
class OnNode:
    """A build to be done in a job.

    given: the command line's own options, option -> value, list of values or None; site: as --site has it;
    allow_files: --allow-files.
    """

    request: Request
    given: Mapping[str, str | Path | list[str] | None]
    site: str | None
    environment: Mapping[str, str]
    allow_files: bool = False

    def preview(self, report: Callable[[str], None]) -> str:
        """Return the definition, then the script that sbatch would get. Raises UserError."""
        request = ask(self.site, self.environment)
        result = preview(self.request, report)
        script = self._script(request, result.target)
        log = _log_path(result.target, "NNNNNNNN")
        report(f"would run: {shlex.join(Slurm().command((), _SCRIPT, (str(log),), log=str(log)))}")
        return f"{result.definition}\n# --- {_SCRIPT}: what sbatch gets\n{script}"

    def build(self, report: Callable[[str], None]) -> tuple[Path, bool]:
        """Build it in a job; the image, and whether there was nothing to do.

        What can be refused without a builder is refused here, before anything is submitted. The job's log goes to
        `report` as it grows. Raises UserError, ExternalError, and Stopped (ctrl-C, SIGTERM, SIGHUP): the job is
        cancelled then.
        """
        request = ask(self.site, self.environment)
        if shutil.which("sbatch") is None:
            todo = f"use a login node of the cluster (some need `module load slurm`), or {HERE}"
            raise UserError("sbatch is not on this machine", where="--on-node", todo=todo)

        def unreachable(error: ExternalError) -> None:
            report(f"note: cannot reach the registry of the base from this machine; the node will try: {error}")

        rules = rules_of(self.site, self.environment)
        decision = decide(self.request, lambda: rules, unreachable)
        if decision.up_to_date:
            return decision.target, True
        target = decision.target
        if (builder := holder(target)) is not None:
            raise UserError(f"{target} is already being built by {builder.who}", todo=builder.todo)
        self._run(target, self._script(request, target), report)
        return target, False

    def _run(self, target: Path, script: str, report: Callable[[str], None]) -> None:
        log = _log_path(target, secrets.token_hex(4))
        slurm = Slurm()
        with StopSignals() as stop:
            with _place_for(log):
                try:
                    job_id = _submit(slurm, script, log, self.request.cwd)
                except (UserError, ExternalError):
                    stop.check()  # ctrl-C in a terminal ends sbatch, too
                    raise
            job = BuildJob(slurm, job_id, log, target)
            report(f"job {job_id} builds {target}")
            try:
                failure = follow(job, report, stop)
            except BaseException:
                end(job, report)
                raise
            finally:
                # The job is over: what is still there of it, it was killed before it could clean up.
                for path in (log, *left_over(target)):
                    with contextlib.suppress(OSError):
                        remove(path)
        if failure is not None:
            raise failure

    def _script(self, request: Asked, target: Path) -> str:
        name = re.sub(r"[^A-Za-z0-9._+-]", "-", self.request.image.name)[:80]
        switches = {"--force": self.request.force, "--allow-files": self.allow_files}
        words = [
            "build-image",
            str(target),
            *_options(self.given),
            *(name for name, given in switches.items() if given),
        ]
        if request.site is not None:  # a node's own name would not tell
            words.append(f"--site={request.site}")
        return render(
            "sbatch/build.sh.j2",
            options=(f"--job-name=build-{name}", *request.options),
            setup=request.setup,
            cwd=str(self.request.cwd),
            python=sys.executable,
            words=words,
        )


def _options(given: Mapping[str, str | Path | list[str] | None]) -> Iterator[str]:
    """Return the options again, each value after its own '='."""
    for name, value in given.items():
        for item in value if isinstance(value, list) else [value]:
            if item is not None:
                yield f"--{name}={item}"


def _log_path(target: Path, token: str) -> Path:
    """Return the path of the job's log, beside the image; `clean --images` knows the name. Raises UserError."""
    if "\\" in str(target):  # sbatch cannot be told of such a path
        todo = "put the image in another folder"
        raise UserError(f"the image path {str(target)!r} contains a backslash", where="--on-node", todo=todo)
    return target.with_name(f".{target.name}.{token}.job")


@contextlib.contextmanager
def _place_for(log: Path) -> Iterator[None]:
    """Create the empty log before the job: this machine may see a node's new file late.

    Where the block fails, what was made is removed. Raises UserError.
    """
    absent = [path for path in (log.parent, *log.parent.parents) if not os.path.lexists(path)]
    try:
        with writing(log):
            log.parent.mkdir(parents=True, exist_ok=True)
            log.open("xb").close()  # never through a link
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # another build is in there by now
            log.unlink(missing_ok=True)
            for path in absent:
                path.rmdir()
        raise


def _submit(slurm: Slurm, script: str, log: Path, cwd: Path) -> JobId:
    """Hand the script over; sbatch keeps its own copy. Raises UserError, ExternalError."""
    with tempfile.TemporaryDirectory(prefix="slurmddp-") as folder:
        path = Path(folder, _SCRIPT)
        path.write_text(script, encoding="utf-8")
        command = slurm.command((), str(path), (str(log),), log=str(log))
        try:
            return slurm.submit(command, cwd)
        except UserError as error:
            todo = "images.on_node in the site profile sets what the job asks for; --dry-run --on-node shows it"
            raise UserError(error.what, todo=todo) from None


def build_image(
    target: Path | None = opt.argument("IMAGE.sif", "Image to build  [default: images/NAME-HASH.sif]"),
    recipe: str | None = opt.value("NAME|FILE", "Recipe: ngc-pytorch, ngc-pytorch-ofed, cpu-debian, or a file"),
    base: str | None = opt.value("BASE", "NGC release (25.04), docker://REF, a .sif, or a root folder"),
    apt: list[str] | None = opt.value("PACKAGE", "Install with apt; may be repeated"),
    pip: list[str] | None = opt.value("PACKAGE", "Install with pip; may be repeated"),
    requirements: str | None = opt.value("FILE", "Install a requirements file with pip"),
    job: Path | None = opt.value("JOB.yaml", "Take container.recipe, base, pip and image from a job file"),
    dockerfile: Path | None = opt.value("FILE", "Convert a Dockerfile"),
    context: Path | None = opt.value("DIR", "Build context  [default: the folder of the Dockerfile]"),
    build_arg: list[str] | None = opt.value("NAME=VALUE", "Set an ARG of the Dockerfile; may be repeated"),
    secret: list[str] | None = opt.value(
        "id=NAME,src=FILE",
        "Give a secret to RUN --mount=type=secret; or id=NAME,env=VARIABLE. It does not stay in the image.",
    ),
    stage: str | None = opt.value("NAME", "Dockerfile stage to build  [default: the last]"),
    allow_files: bool = opt.flag("--allow-files", "Allow a recipe to copy files from outside its folder"),
    site: opt.Site = None,
    update: bool = opt.flag("--update", "Check whether the base tag now points to a new digest"),
    force: bool = opt.flag("--force", "Build even if no input has changed, and replace the image"),
    on_node: bool = opt.flag("--on-node", "Build in a batch job and follow its log"),
    dry_run: bool = opt.flag("--dry-run", "Print the definition file; build nothing"),
    as_json: opt.Json = False,
) -> None:
    """Build an image with Apptainer or Singularity. Skip the build if no input has changed."""
    cwd = Path.cwd()
    if job is not None:
        of_job = image_of_job(job)
        recipe, base, pip = recipe or of_job.recipe, base or of_job.base, [*of_job.pip, *(pip or [])]
        target, site = target or of_job.target, site or of_job.site
    options = {"base": base, "apt": apt, "pip": pip, "requirements": requirements}
    spec = wanted_image(
        recipe, dockerfile, build_arg or [], stage, options, cwd, os.environ,
        context=context, secrets=secret or [], allow_files=allow_files,
    )  # fmt: skip
    request = Request(spec, target, cwd, force, update, commit_of)
    if on_node:
        given = {
            "recipe": recipe, "dockerfile": dockerfile, "context": context, "build-arg": build_arg, "secret": secret,
            "stage": stage, **options,
        }  # fmt: skip
        batch = OnNode(request, given, site, os.environ, allow_files)
    if dry_run:
        typer.echo(exact(batch.preview(opt.say) if on_node else preview(request, opt.say).definition), nl=False)
    elif on_node:
        _tell_built(*batch.build(opt.say), as_json=as_json)
    else:
        with Progress() as progress:
            known = rules_of(site) if site else None  # an unknown site is refused whatever there is to do
            result = build(request, opt.say, lambda: known or rules_of(None), progress.tell)
        _tell_built(result.target, result.up_to_date, as_json=as_json)


def _tell_built(image: Path, up_to_date: bool, *, as_json: bool) -> None:
    if up_to_date:
        opt.say("up to date: no input has changed since the last build (--force builds again)")
    typer.echo(opt.json_text({"image": str(image), "up_to_date": up_to_date}) if as_json else image)
