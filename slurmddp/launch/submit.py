"""Hands a prepared job over to Slurm or to this machine."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from slurmddp.alerts import secrets
from slurmddp.cluster.base import JobId
from slurmddp.cluster.choose import scheduler_for, scheduler_named
from slurmddp.cluster.client import Slurm
from slurmddp.errors import ExternalError, UserError
from slurmddp.job.plan.model import Plan
from slurmddp.job.sensitive import redacted, refuse_values
from slurmddp.launch.avoid import avoid
from slurmddp.launch.job_check.rule import advice
from slurmddp.launch.prepare import Prepared
from slurmddp.launch.problems import refuse_problems
from slurmddp.launch.quotas import home_warning
from slurmddp.launch.workdir import files_before, relative_paths, shared_files, workdir_in
from slurmddp.launch.write import run_files, survey_project, write_pair_of
from slurmddp.records.rehearsal import VERDICT
from slurmddp.records.submission import now
from slurmddp.render.scripts import payloads, python_of_submit
from slurmddp.run import index, manifest, rehearsed, snapshot, submission
from slurmddp.run.continued import claim
from slurmddp.run.create import Draft, create, folder_error, shared_folder
from slurmddp.run.evidence import evidence, evidence_of
from slurmddp.run.gate import OwnRun, own, own_or_none
from slurmddp.run.layout import RunFolder
from slurmddp.run.state import judge, next_commands
from slurmddp.run.survey import Survey
from slurmddp.run.unanswered import with_job

#: Seconds before each look for a job whose submission sbatch did not answer.
LOOKS = (0.0, 3.0)
#: As long as this, sbatch may still be about to answer another submission.
PATIENCE = timedelta(seconds=150)
#: A controller that was slow may put such a job into the queue as late as this.
DOUBT = timedelta(minutes=10)


@dataclass(frozen=True)
class Handed:
    """What a submission came to."""

    run_id: str
    job_id: str
    run_folder: str
    log: str
    site: str
    scheduler: str
    gpu_hours: float | None
    warnings: tuple[str, ...]
    code: str | None = None  # what was copied into the run folder

    def as_dict(self) -> dict[str, Any]:
        job_id, _, cluster = self.job_id.partition(";")
        told = {name: value for name, value in vars(self).items() if name != "code"}
        next_ = next_commands(self.run_id, "pending")
        return {**told, "job_id": job_id, "cluster": cluster or None, "warnings": list(self.warnings), "next": next_}


def command_line(plan: Plan, folder: RunFolder, options: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the command that submits a run folder. Raises UserError for a path that sbatch does not accept."""
    scheduler = scheduler_named(plan.site.scheduler)
    return scheduler.command(options, str(folder.job_sh), (str(folder.path),), log=str(folder.job_log))


def job_warnings(prepared: Prepared, files: Mapping[str, str]) -> list[str]:
    """Return what every way to start the job warns of. files: the `files_before`."""
    plan = prepared.plan
    return [*advice(prepared), *shared_files(plan, files), *relative_paths(plan), *_still_going(prepared)]


def submit(prepared: Prepared, tell: Callable[[str], None] = lambda doing: None) -> Handed:
    """Make the run folder and start the job. tell: gets what is being done while it takes long.

    Raises UserError with nothing left behind.
    """
    plan = prepared.plan
    refuse_problems(prepared)
    avoided = avoid(prepared)
    files = files_before(prepared)
    inside = None if plan.inside or not plan.site.queues else os.environ.get("SLURM_JOB_ID")
    warnings = [
        *([f"this shell is in Slurm job {inside}: this is a new job; `slurmddp run` uses that one"] if inside else ()),
        *job_warnings(prepared, files),
        *avoided.warnings,
        *refuse_unanswered(plan),
    ]
    root = Path(plan.runs_root)
    absent = [path for path in (root, *root.parents) if not os.path.lexists(path)]
    copied: list[str] = []
    folder = make_run_folder(prepared, warnings, copied, files=files, tell=tell)
    scheduler = scheduler_named(plan.site.scheduler)
    try:
        warnings += continue_run(prepared, folder)
        command = command_line(plan, folder, avoided.options)
        if plan.site.queues:  # whatever becomes of sbatch or its answer, this run is known
            warnings += announce(folder, command)
        try:
            job_id = scheduler.submit(command, root, log=folder.job_log)
        except ExternalError as error:
            job_id = found_after(folder, command, error)
            warnings.append(f"sbatch did not answer as expected, but the queue has its job {job_id}: {error}")
    except UserError:
        # Refused: no job has this folder. (An answer that nobody understands is another error, and keeps it.)
        discard(folder)
        for made in absent:
            with contextlib.suppress(OSError):  # another run is in it by now
                made.rmdir()
        raise
    record(folder, str(job_id), plan.site.scheduler, command, warnings)
    if warning := submit_watchdog(plan, folder, job_id):
        warnings.append(warning)
    return Handed(
        run_id=folder.id,
        job_id=str(job_id),
        run_folder=str(folder.path),
        log=str(folder.job_log),
        site=plan.site.name,
        scheduler=plan.site.scheduler,
        gpu_hours=plan.gpu_hours,
        warnings=tuple(warnings),
        code=copied[0] if copied else None,
    )


def make_run_folder(
    prepared: Prepared,
    warnings: list[str],
    copied: list[str] | None = None,
    *,
    files: Mapping[str, str] | None = None,
    no_code: Sequence[Path] = (),
    tell: Callable[[str], None] = lambda doing: None,
) -> OwnRun:
    """Create the run folder with scripts, snapshot and manifest. Raises UserError, and then leaves nothing behind.

    Its secrets (addresses of alerts, environment_from) are read here, and leave this process's environment: the job
    must not inherit them. files: the `files_before`. no_code: folders of the project that are not copied.
    """
    plan = prepared.plan
    if warning := shared_folder(Path(plan.runs_root)):
        warnings.append(warning)
    if plan.site.queues and (warning := home_warning(Path(plan.runs_root), os.environ.get("HOME", ""))):
        warnings.append(warning)

    def fill(draft: Draft) -> None:
        survey = _fill(draft, prepared, warnings, variables, files or {}, no_code, tell)
        if copied is not None and survey is not None:
            copied.append(survey.summary())

    secrets.forget_old(os.environ)
    targets = plan.alerts.targets if plan.alerts else ()
    addresses = secrets.take(targets, os.environ, plan.program.project if plan.job.snapshot else None)
    variables = secrets.take_variables(plan.job.environment_from, os.environ)
    made = create(Path(plan.runs_root), plan.job.name, {}, fill=fill, mode=plan.job.paths.permissions)
    folder = own(made, to="submit it")
    try:
        if addresses or variables:
            last = secrets.last_alerts(plan.alerts, payloads(plan), folder.id, str(folder.path)) if plan.alerts else {}
            secrets.keep(folder, addresses, os.environ, variables, last)
    except UserError:
        folder.remove_all()
        raise
    return folder


def _fill(
    draft: Draft,
    prepared: Prepared,
    warnings: list[str],
    variables: Mapping[str, str],
    files_before: Mapping[str, str],
    no_code: Sequence[Path],
    tell: Callable[[str], None],
) -> Survey | None:
    """Return what was copied of the project.

    variables: the secrets of `environment_from`, which must stand in none of the files.
    """
    plan = prepared.plan
    files = run_files(prepared, draft.final.id)
    refuse_values(variables, files)
    draft.write(files)
    warnings.extend(write_pair_of(plan, draft.folder))
    snapshot.copy_runtime(draft.folder.code)
    project = Path(plan.program.project) if plan.program.project else None
    if (survey := survey_project(plan, *no_code)) is not None:
        warnings.extend(survey.warnings)
        snapshot.copy_project(survey, draft.folder.project, tell)
    files = snapshot.code_files(draft.folder.code)
    code_hash = snapshot.hash_of_files(files)
    snapshot.write_list(draft.folder, files)
    if (verdict := rehearsed.find(code_hash, plan)) is not None:
        draft.write({VERDICT: verdict.text()})
    tell("")
    image = plan.container.image
    set_by = prepared.resolved.layered.origins.items()
    origins = {".".join(key): f"{origin.layer}: {origin.where}" for key, origin in set_by if not origin.implied}
    facts = manifest.build(
        draft.final,
        name=plan.job.name,
        command=redacted(sys.argv, variables.values()),
        project=project,
        code_hash=code_hash,
        image=Path(image) if image else None,
        resumed_from=[str(run.path) for run in prepared.resumed.runs],
        more={
            "site": plan.site.name,
            "workdir": workdir_in(plan, draft.final.path),
            "files_before": dict(files_before),
            "origins": origins,
        },
    )
    manifest.write(draft.folder, facts)
    return survey


def record(folder: OwnRun, job_id: str, scheduler: str, command: Sequence[str], warnings: list[str]) -> None:
    """Write submission.json and the index. The job exists by now, so what cannot be written is a warning."""
    try:
        submission.write(folder, now(job_id, scheduler, command))
    except OSError as error:
        warnings.append(
            f"job {job_id} was submitted, but {folder.submission} cannot be written: {error.strerror}. Free "
            f"some space and note the job id: `slurmddp status` and `cancel` find the job only after it has started"
        )
    warnings += [text for text in _in_index(folder, job_id) if text not in warnings]


def discard(folder: OwnRun) -> None:
    """Remove a run that will have no job, and its secrets. Raises OSError."""
    folder.remove_all()
    secrets.forget(folder.id, os.environ)


def continue_run(prepared: Prepared, folder: OwnRun) -> list[str]:
    """Note in the run that this one resumes from that it is continued. Returns warnings.

    Raises UserError if another one of the same name continues it, and is not over.
    """
    source = own_or_none(prepared.resumed.run) if prepared.resumed.run else None
    if source is None:  # in the run of a colleague, nothing can be written
        return []
    try:
        claim(source, prepared.plan.job.name, folder)
    except OSError as error:
        text = error.strerror or str(error)
        return [f"{source.continued} cannot be written ({text}): a second --resume of {source.id} will not be noticed"]
    return []


def announce(folder: OwnRun, command: Sequence[str]) -> list[str]:
    """Write down that sbatch is about to be called: its answer may be lost. Returns warnings. Raises UserError."""
    try:
        submission.write(folder, now("", "slurm", command))
    except OSError as error:
        raise folder_error(error, folder.path) from error
    return _in_index(folder, "")


def _in_index(folder: OwnRun, job_id: str) -> list[str]:
    entry = index.entry_of(folder)
    warning = index.record(replace(entry, job_id=job_id)) if entry else None
    return [warning] if warning else []


def found_after(folder: OwnRun, command: Sequence[str], error: ExternalError) -> JobId:
    """Return the job of a submission that sbatch did not answer. Raises ExternalError if it is not found now."""
    with contextlib.suppress(OSError):  # after some minutes, what stands there already means the same
        submission.write(folder, now("", "slurm", command)._replace(failed=str(error).splitlines()[0]))
    state = "no job of this run is in the queue yet"
    for pause in LOOKS:
        time.sleep(pause)
        try:
            if (job_id := with_job(folder, evidence(folder)).job_id) is not None:
                return job_id
        except (ExternalError, UserError) as silent:
            state = f"nor is it known whether the job is in the queue: {silent}"
    todo = f"`slurmddp status {folder.id}` looks for the job again, and so does the next `slurmddp submit`"
    raise ExternalError(f"{error}\n  {state}\n  -> {todo}") from error


def refuse_unanswered(plan: Plan) -> list[str]:
    """Return warnings about a run of this name whose submission had no answer. Raises UserError if it has a job."""
    known = index.of_name(plan.job.name, 3) if plan.site.queues else []
    for folder, facts in evidence_of([entry.folder for entry in known if not entry.job_id], lambda message: None):
        sent = facts.submission
        if sent is None or not facts.unanswered:
            continue
        age = datetime.now().astimezone() - datetime.fromisoformat(sent.time)
        if not sent.failed and age < PATIENCE:
            continue
        silent = f"sbatch did not answer when run {folder.id} of the same name was submitted, at {sent.time}"
        try:
            job_id = with_job(folder, facts).job_id
        except (ExternalError, UserError) as error:
            return [f"{silent}: its job may be in the queue ({error})"]
        if job_id is not None:
            raise UserError(
                f"run {folder.id} of the same name is in the queue as job {job_id}: sbatch did not answer when it was "
                "submitted",
                todo=f"to follow it: slurmddp status {folder.id}; for one more job, submit again",
            )
        if age < DOUBT:
            return [f"{silent}: its job may still appear in the queue"]
    return []


def _still_going(prepared: Prepared) -> list[str]:
    """Return a warning if the run that this one resumes from is still going."""
    if (run := prepared.resumed.run) is None:
        return []
    facts = evidence(run)
    try:
        view = scheduler_for(facts.job_id).job(facts.job_id) if facts.job_id else None
    except (ExternalError, UserError):
        return []  # nobody knows; the submission itself will tell what is wrong with Slurm
    state = judge(view, facts)
    again = f"run {run.id} is still {state.state}; both runs will now train from its newest checkpoint"
    return [again] if state.going else []


def submit_watchdog(plan: Plan, folder: OwnRun, job_id: JobId) -> str | None:
    """Submit the watchdog behind the job.

    Returns None, or a warning: a watchdog job that Slurm refuses must not cost the run.
    """
    if plan.watchdog is None:
        return None
    planned = plan.watchdog  # the script passes them on to the next one
    cluster = [f"--clusters={job_id.cluster}"] if job_id.cluster else []
    options = [*planned, "--open-mode=append", f"--dependency=afterany:{job_id.id}", *cluster]
    python = python_of_submit()
    slurm = Slurm()
    try:
        command = slurm.command(
            options,
            str(folder.python_sh),
            (python, str(folder.code_archive), "watchdog", str(folder.path), job_id.id, python, *planned),
            log=str(folder.logs / "watchdog.log"),
        )
        slurm.submit(command, folder.path)
    except (UserError, ExternalError, OSError) as error:
        return f"could not submit the watchdog job: {error}"
    return None
