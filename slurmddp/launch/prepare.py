"""A request of the command line, resolved and planned."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from slurmddp.errors import UserError, collecting, together
from slurmddp.job.document import Document, is_null, read_data, read_file
from slurmddp.job.plan.build import make_plan
from slurmddp.job.plan.model import Allocation, Context, Plan
from slurmddp.job.plan.program import plan_program
from slurmddp.job.plan.sbatch import missing_settings
from slurmddp.job.resolve import Resolved, Sources, is_site_file, resolve
from slurmddp.job.sensitive import refuse_secrets
from slurmddp.job.validate import depends_on
from slurmddp.launch.job_check.cluster import Cluster
from slurmddp.launch.modules import module_file
from slurmddp.launch.named_file import JOB_SUFFIXES, wrong_file
from slurmddp.launch.node_share import with_share
from slurmddp.launch.python_environment import with_active
from slurmddp.launch.this_machine import python_for_torch, with_gpus
from slurmddp.run.version import version
from slurmddp.sites.catalogue import Catalogue, config_files

if TYPE_CHECKING:
    from slurmddp.run.layout import RunFolder


@dataclass(frozen=True)
class Request:
    """What a command was asked.

    job:     a job file, what one contains, or a script; None where `module` is given, or where `resume` names a run
             whose job is taken.
    args:    what stood behind `--`: the program's arguments.
    options: (key path, value, how the user wrote it).
    resume:  the run to continue: id, prefix, job id, folder or `last`.
    written: a run's own job.yaml: what looks like a secret in it is written down already.
    module:  a Python module to start, in the place of a job file.
    cluster: answers of Slurm that several requests share.
    """

    job: str | Mapping[str, Any] | None
    args: Sequence[str] = ()
    options: Sequence[tuple[str, Any, str]] = ()
    resume: str | None = None
    strict: bool = True
    inside: bool = False
    written: bool = False
    module: str | None = None
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    cluster: Cluster | None = None


class Prepared(NamedTuple):
    """save_seconds: the longest save of the runs that are continued, where one is known."""

    resolved: Resolved
    plan: Plan
    resumed_from: tuple[Path, ...]
    save_seconds: float | None = None


def prepare(request: Request) -> Prepared:
    """Resolve and plan a job. Raises UserError for every mistake in the job, the site or the command line."""
    resumed = _resumed_runs(request)
    errors: list[UserError] = []
    with collecting(errors):
        _check_file(request)
    wrong = len(errors)
    with collecting(errors):
        resolved = _resolved(request, resumed)
    if len(errors) > wrong:
        raise together(errors)
    if not request.written:
        refuse_secrets(resolved)
    cwd = _cwd(request.environment)
    resolved = with_gpus(_with_project(resolved, cwd), request.environment)
    resolved, found = with_active(resolved, request.environment)
    folders = tuple(str(path / "checkpoints") for path in resumed)
    allocation = _allocation(request.environment) if request.inside else None
    seconds = _save_seconds(resumed)
    if request.strict:
        errors += [
            *resolved.mistakes,
            *([] if request.inside or not resolved.site_known else missing_settings(resolved)),
        ]
    context = Context(
        cwd, python_for_torch(request.environment), folders, request.inside, allocation, seconds, version()
    )
    if not resolved.site_known:
        raise _all_of([*errors, *_on_any_site(resolved, context, program=not wrong)], resolved.mistakes)
    resolved, notes = (resolved, []) if request.inside else with_share(resolved, request.cluster)
    prepared = None
    with collecting(errors):
        plan = _planned(resolved, context, errors)
        prepared = Prepared(resolved, plan._replace(notes=(*found, *notes, *plan.notes)), resumed, seconds)
        if errors:
            from slurmddp.launch.problems import refuse_problems

            refuse_problems(prepared, program=not wrong)
    if prepared is None and not wrong:
        errors += _absent_script(resolved, context)
    if errors:
        raise _all_of(errors, resolved.mistakes)
    return prepared


def _all_of(errors: Sequence[UserError], mistakes: Sequence[UserError]) -> UserError:
    """Return one error that lists these, without those that only follow from one of the mistakes among them."""
    first = len(errors) if not mistakes else errors.index(mistakes[-1]) + 1
    later = [each for error in errors[first:] for each in error.parts]
    return together([*errors[:first], *(each for each in later if not depends_on(each, mistakes))])


def _planned(resolved: Resolved, context: Context, errors: list[UserError]) -> Plan:
    """Plan the job. errors: gets what is wrong with its GPUs, if a plan without GPUs shows the rest."""
    try:
        return make_plan(resolved, context)
    except UserError as error:
        resources = resolved.job.resources.model_copy(update={"gpus_per_node": 0})
        job = resolved.job.model_copy(update={"resources": resources})
        try:
            plan = make_plan(resolved._replace(job=job), context)
        except UserError:
            raise error from None
        errors.append(error)
        return plan


def _on_any_site(resolved: Resolved, context: Context, *, program: bool) -> list[UserError]:
    """Return what a job whose site is unknown names and this machine lacks. What a site may add is not missed."""
    from slurmddp.launch.problems import absent_here

    resources = resolved.job.resources.model_copy(update={"gpus_per_node": 0})
    container = resolved.job.container
    if container.image is None:
        container = container.model_copy(update={"runtime": "none"})
    job = resolved.job.model_copy(update={"resources": resources, "container": container})
    try:
        plan = make_plan(resolved._replace(job=job), context)
    except UserError:  # perhaps because of the site
        return _absent_script(resolved, context) if program else []
    return list(absent_here(Prepared(resolved, plan, tuple(map(Path, context.resume_from))), program=program))


def _absent_script(resolved: Resolved, context: Context) -> list[UserError]:
    """Return the error for a script that is not there, of a job that has no plan."""
    from slurmddp.launch.problems import absent_script

    try:
        found = absent_script(plan_program(resolved.job, context), resolved.location("train", "script"))
    except UserError:  # it is why there is no plan
        return []
    return [found] if found else []


def _check_file(request: Request) -> None:
    """Raise UserError for a job on the command line that is neither a job file nor a script that is there."""
    name = request.job
    if not isinstance(name, str) or request.module is not None or name.endswith(JOB_SUFFIXES):
        return
    if (request.strict or os.path.lexists(name)) and (error := wrong_file(name, resumes=request.resume is not None)):
        raise error


def resolved_job(request: Request, resumed: Sequence[Path] = ()) -> Resolved:
    """Return the job and its site, without a plan. Raises UserError."""
    resolved = _resolved(request, resumed)
    if resolved.mistakes:
        raise together(resolved.mistakes)
    return resolved


def _resolved(request: Request, resumed: Sequence[Path]) -> Resolved:
    job_file, options = _job_and_options(request)
    if job_file is None and request.job is None and request.module is None:
        if not resumed:
            raise UserError(
                "no job file or script given", todo="add one to the command line; `slurmddp init` writes job.yaml"
            )
        from slurmddp.run.gate import own
        from slurmddp.run.layout import RunFolder

        job_file = RunFolder(resumed[0]).job_yaml
        todo = f"read its job file, then pass it: {job_file} --resume {resumed[0]}"
        own(RunFolder(resumed[0]), to="run its commands and image with your account", todo=todo)
    catalogue = Catalogue(request.environment)
    configured = config_files(request.environment)
    sources = Sources(job_file, options, request.environment, configured, _site_of(resumed))
    return resolve(sources, catalogue.load, lambda: _detected(catalogue, request), strict=request.strict)


def _with_project(resolved: Resolved, cwd: str) -> Resolved:
    """Return the job with this folder as its project if its module is here: `python -m` would find it here, too."""
    train = resolved.job.train
    if train.module is None or train.project is not None or module_file(cwd, train.module) is None:
        return resolved
    train = train.model_copy(update={"project": cwd})
    return resolved._replace(job=resolved.job.model_copy(update={"train": train}))


def _site_of(resumed: Sequence[Path]) -> tuple[str, str] | None:
    """Return the site of the resumed run, and the file that sets it; None without a resumed run.

    The run of another user may name a profile, but no file: its lines would run with this user's account.
    """
    if not resumed:
        return None
    from slurmddp.run.gate import stranger
    from slurmddp.run.layout import RunFolder

    folder = RunFolder(resumed[0])
    path = folder.job_yaml
    if not path.is_file():
        return None  # whatever is wrong with that folder, the job may name its site itself
    site = read_file(path, "resumed run", below=folder.path).tree.get("site")
    if not isinstance(site, str) or (is_site_file(site) and stranger(folder)):
        return None
    return site, str(path)


def _save_seconds(runs: Sequence[Path]) -> float | None:
    """Return the longest save of a checkpoint of these runs; None if unknown."""
    if not runs:
        return None
    from slurmddp.run.checkpoint_durations import longest_save

    return longest_save(runs)


def _job_and_options(request: Request) -> tuple[Path | Document | None, list[tuple[str, Any, str]]]:
    options = list(request.options)
    args = ("train.args", [str(item) for item in request.args], "after --")
    if request.module is not None:
        return None, [("name", request.module, "-m"), ("train.module", request.module, "-m"), args, *options]
    if isinstance(request.job, Mapping):
        return read_data(request.job, "job", "job"), options
    if request.job is None or request.job.endswith(JOB_SUFFIXES):
        if request.args:
            options.append(args)
        return (Path(request.job) if request.job else None), options
    script = Path(request.job)
    front: list[tuple[str, Any, str]] = [("name", _program_name(script), request.job)]
    # `$` has a meaning in paths of a job file; the command line's own words have none left.
    front.append(("train.script", request.job.replace("$", "$$"), request.job))
    front.append(args)
    return None, front + options


def _program_name(script: Path) -> str:
    """Return the name of a script's runs: FOLDER-SCRIPT, because many projects have a train.py."""
    folder = script.absolute().parent
    of_folder = "" if str(folder) in ("/", os.path.expanduser("~")) else os.path.basename(os.path.normpath(folder))
    return job_name(Path(f"{of_folder[:50]}-{script.stem}.py" if of_folder not in ("", script.stem) else script))


def job_name(path: Path) -> str:
    """Return a job name made from a file name."""
    name = re.sub(r"[^A-Za-z0-9._+-]+", "-", path.stem).strip("-._+")[:100]
    return "job" if is_null(name) else name


def _resumed_runs(request: Request) -> tuple[Path, ...]:
    """Return the run to resume and the runs that it resumed from, newest first."""
    if request.resume is None:
        return ()
    from slurmddp.launch.find import find_run

    folder = find_run(request.resume, request.environment)
    runs = [folder.path, *(path for path in _continued(folder) if path.is_dir())]
    if not any(map(_has_checkpoint, runs)):
        raise UserError(
            f"run {folder.id} has no complete checkpoint yet",
            where="--resume",
            todo="submit its job without --resume",
        )
    return tuple(runs)


def _has_checkpoint(run: Path) -> bool:
    """Return whether a run has a checkpoint: a complete one of slurmddp, or whatever a framework has saved."""
    saved = run.glob("checkpoints/[!.]*")
    return any(not path.name.startswith("step-") or (path / "COMPLETE").exists() for path in saved)


def _continued(folder: RunFolder) -> list[Path]:
    """Return the runs that a run resumed from, newest first. Raises UserError if its checkpoints are unknown."""
    from slurmddp.shared.files import read_json

    if not folder.job_json.is_file():
        from slurmddp.run import manifest

        earlier = manifest.read(folder).get("resumed_from")
        runs = [Path(text) for text in earlier if isinstance(text, str)] if isinstance(earlier, list) else []
        if not runs and not any(folder.checkpoints.glob("[!.]*")):
            raise UserError(
                f"run {folder.id} ran your own script, which has saved nothing in {folder.checkpoints}",
                where="--resume",
                todo="submit the script again, with its own option for resuming; or save there (docs/frameworks.md)",
            )
        return runs
    try:
        earlier = read_json(folder.job_json, folder.path).get("resume_from", [])
    except (ValueError, AttributeError):
        raise UserError("is damaged", where=str(folder.job_json), todo="resume another run") from None
    return [Path(text).parent for text in earlier]


def _allocation(environment: Mapping[str, str]) -> Allocation | None:
    """Return the nodes and minimum cores per node of the current Slurm job; None outside of one.

    SLURM_JOB_CPUS_PER_NODE is such as `4(x2),2` (sbatch(1), output environment variables).
    """
    nodes = environment.get("SLURM_JOB_NUM_NODES", "")
    cpus = re.findall(r"(\d+)(?:\(x\d+\))?(?:,|$)", environment.get("SLURM_JOB_CPUS_PER_NODE", ""))
    return Allocation(int(nodes), min(map(int, cpus), default=None)) if nodes.isdigit() else None


def _detected(catalogue: Catalogue, request: Request) -> tuple[str, str] | None:
    from slurmddp.sites.detect import detect
    from slurmddp.sites.host import this_host

    found = detect(catalogue, this_host(request.environment))
    if found is not None or not request.inside:
        return found
    if job := request.environment.get("SLURM_JOB_ID"):
        raise UserError(
            f"this shell is in Slurm job {job}, whose nodes `run` would use, but no site profile matches this host",
            todo="name one: --site generic; or --site local for this machine alone",
        )
    if shutil.which("sbatch", path=request.environment.get("PATH")):
        return None
    return "local", "no profile matches this host, and sbatch is not in PATH"


def _cwd(environment: Mapping[str, str]) -> str:
    """Return the shell's name of the current folder if valid: /home/x, not /nfs/17/x behind a link."""
    shown = environment.get("PWD", "")
    try:
        if os.path.isabs(shown) and os.path.samefile(shown, "."):
            return os.path.normpath(shown)
        return os.getcwd()
    except OSError as error:
        raise UserError(f"the current folder cannot be read: {error.strerror}", todo="cd to another folder") from None
