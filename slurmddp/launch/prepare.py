"""A request of the command line, resolved and planned."""

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from slurmddp.errors import UserError, collecting, together
from slurmddp.job.document import read_data
from slurmddp.job.plan.build import make_plan
from slurmddp.job.plan.model import Allocation, Context, Plan
from slurmddp.job.plan.program import plan_program
from slurmddp.job.plan.sbatch import missing_settings
from slurmddp.job.resolve import Request, Resolved, resolve
from slurmddp.job.sensitive import refuse_secrets
from slurmddp.job.validate import depends_on
from slurmddp.launch.job_check.cluster import Cluster
from slurmddp.launch.named_file import JOB_SUFFIXES, module_file, program_name, wrong_file
from slurmddp.launch.node_share import with_share
from slurmddp.launch.python_environment import with_active
from slurmddp.launch.resumed import Resumed, find_resumed
from slurmddp.launch.this_machine import python_for_torch, with_gpus
from slurmddp.run.gate import own
from slurmddp.run.version import version
from slurmddp.sites.catalogue import Catalogue, config_files


class Prepared(NamedTuple):
    """A job that can be rendered. resumed: the runs that it continues. files: name -> text of more files of its run."""

    resolved: Resolved
    plan: Plan
    resumed: Resumed = Resumed()
    files: Mapping[str, str] = {}


def prepare(request: Request, *, strict: bool = True, cluster: Cluster | None = None) -> Prepared:
    """Resolve and plan a job. Raises UserError for every mistake in the job, the site or the command line.

    strict: as `submit` does; else what is shown only may lack something. cluster: answers of Slurm that jobs share.
    """
    resumed = find_resumed(request.resume, request.environment)
    request = _without_words(request)
    errors: list[UserError] = []
    name = request.job
    if isinstance(name, str) and not name.endswith(JOB_SUFFIXES) and (strict or os.path.lexists(name)):
        errors += filter(None, [wrong_file(name, resumes=request.resume is not None)])
    wrong = len(errors)
    with collecting(errors):
        resolved = _resolved(request, resumed, strict=strict)
    if len(errors) > wrong:
        raise together(errors)
    refuse_secrets(resolved)
    cwd = _cwd(request.environment)
    resolved = with_gpus(_with_project(resolved, cwd), request.environment)
    resolved, active_notes = with_active(resolved, request.environment)
    if strict:
        errors += [
            *resolved.mistakes,
            *([] if request.inside or not resolved.site_known else missing_settings(resolved)),
        ]
    context = Context(
        cwd=cwd,
        python=python_for_torch(request.environment),
        resume_from=resumed.places(),
        inside=request.inside,
        allocation=_allocation(request.environment) if request.inside else None,
        save_seconds=resumed.longest_save,
        version=version(),
    )
    if not resolved.site_known:
        raise _all_of([*errors, *_on_any_site(resolved, context, resumed, program=not wrong)], resolved.mistakes)
    resolved, notes = (resolved, []) if request.inside else with_share(resolved, cluster)
    prepared = None
    with collecting(errors):
        plan = _planned(resolved, context, errors)
        prepared = Prepared(resolved, plan._replace(notes=(*active_notes, *notes, *plan.notes)), resumed)
        if errors:
            from slurmddp.launch.problems import refuse_problems

            refuse_problems(prepared, program=not wrong)
    if prepared is None and not wrong:
        errors += _absent_script(resolved, context)
    if errors:
        raise _all_of(errors, resolved.mistakes)
    return prepared


def prepare_or_refuse(request: Request) -> tuple[Prepared, UserError | None]:
    """Prepare the job as `submit` does or, where it has mistakes, as far as it can be shown; and the mistakes.

    Raises UserError where there is no job to show.
    """
    try:
        return prepare(request), None
    except UserError as refused:
        try:
            return prepare(request, strict=False), refused
        except UserError:  # the first error lists more
            raise refused from None


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


def _on_any_site(resolved: Resolved, context: Context, resumed: Resumed, *, program: bool) -> list[UserError]:
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
    return list(absent_here(Prepared(resolved, plan, resumed), program=program))


def _absent_script(resolved: Resolved, context: Context) -> list[UserError]:
    """Return the error for a script that is not there, of a job that has no plan."""
    from slurmddp.launch.problems import absent_script

    try:
        absent = absent_script(plan_program(resolved.job, context), resolved.location("train", "script"))
    except UserError:  # it is why there is no plan
        return []
    return [absent] if absent else []


def resolved_job(request: Request, resumed: Resumed | None = None) -> Resolved:
    """Return the job and its site, without a plan. Raises UserError."""
    resolved = _resolved(request, resumed or Resumed(), strict=True)
    if resolved.mistakes:
        raise together(resolved.mistakes)
    return resolved


def _resolved(request: Request, resumed: Resumed, *, strict: bool) -> Resolved:
    if request.job is None and request.module is None:
        if resumed.run is None:
            todo = "add one to the command line; `slurmddp init` writes job.yaml"
            raise UserError("no job file or script given", todo=todo)
        todo = f"read its job file, then pass it: {resumed.run.job_yaml} --resume {resumed.run.path}"
        own(resumed.run, to="run its commands and image with your account", todo=todo)
        request = replace(request, job=resumed.run.job_yaml)
    request = _with_program(request)
    catalogue = Catalogue(request.environment)
    return resolve(
        request,
        config_files(request.environment),
        catalogue.load,
        lambda: _detected(catalogue, request),
        strict=strict,
        resumed_site=resumed.site(),
    )


def _with_project(resolved: Resolved, cwd: str) -> Resolved:
    """Return the job with this folder as its project if its module is here: `python -m` would find it here, too."""
    train = resolved.job.train
    if train.module is None or train.project is not None or module_file(cwd, train.module) is None:
        return resolved
    train = train.model_copy(update={"project": cwd})
    return resolved._replace(job=resolved.job.model_copy(update={"train": train}))


def _without_words(request: Request) -> Request:
    """Return the request with the first word as an argument where it names no job: behind -m MODULE, or behind `--`."""
    word = request.job
    if not isinstance(word, str) or (request.module is None and not (request.resume and word.startswith("-"))):
        return request
    return replace(request, job=None, args=(word, *request.args))


def _with_program(request: Request) -> Request:
    """Return the request with its job file to read, and with options for a script, a module and their arguments."""
    job, args = request.job, ("train.args", [str(item) for item in request.args], "after --")
    if request.module is not None:
        front = [("name", request.module, "-m"), ("train.module", request.module, "-m"), args]
        return replace(request, job=None, options=[*front, *request.options])
    if isinstance(job, Mapping):
        return replace(request, job=read_data(job, "job", "job"))
    if isinstance(job, str) and not job.endswith(JOB_SUFFIXES):
        # `$` has a meaning in paths of a job file; the command line's own words have none left.
        front = [("name", program_name(Path(job)), job), ("train.script", job.replace("$", "$$"), job), args]
        return replace(request, job=None, options=[*front, *request.options])
    request = replace(request, job=Path(job) if isinstance(job, str) else job)
    return request.adding(args) if request.args else request


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

    site = detect(catalogue, this_host(request.environment))
    if site is not None or not request.inside:
        return site
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
