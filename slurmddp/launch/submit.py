"""Hands a prepared job over: to Slurm, to this machine, or to the allocation that we are in."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmddp.errors import ExternalError, UserError
from slurmddp.launch.checks import doubts, problems
from slurmddp.launch.prepare import Prepared
from slurmddp.launch.write import run_files
from slurmddp.runs.create import Draft, create
from slurmddp.runs.layout import RunFolder
from slurmddp.slurm.choose import scheduler_for, scheduler_named


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

    def as_dict(self) -> dict[str, Any]:
        """For --json. The keys are stable."""
        job_id, _, cluster = self.job_id.partition(";")
        return {
            "run_id": self.run_id,
            "job_id": job_id,
            "cluster": cluster or None,
            "run_folder": self.run_folder,
            "log": self.log,
            "site": self.site,
            "scheduler": self.scheduler,
            "gpu_hours": self.gpu_hours,
            "warnings": list(self.warnings),
        }


def submit(prepared: Prepared) -> Handed:
    """Make the run folder and start the job. Raises UserError with nothing left behind."""
    plan = prepared.plan
    _refuse_problems(prepared)
    warnings = [*doubts(plan), *_still_going(prepared)]
    root = Path(plan.runs_root)
    absent = [path for path in (root, *root.parents) if not os.path.lexists(path)]
    folder = make_run_folder(prepared, warnings)
    scheduler = scheduler_named(plan.scheduler)
    try:
        command = scheduler.command((), str(folder.job_sh), (str(folder.path),), log=str(folder.job_log))
        job_id = scheduler.submit(command, root, log=folder.job_log)
    except UserError:
        # Refused: no job has this folder. (An answer that nobody understands is another error, and keeps it.)
        shutil.rmtree(folder.path)
        for made in absent:
            with contextlib.suppress(OSError):  # another run is in it by now
                made.rmdir()
        raise
    record(folder, str(job_id), plan.scheduler, command, prepared, warnings)
    return Handed(
        run_id=folder.id,
        job_id=str(job_id),
        run_folder=str(folder.path),
        log=str(folder.job_log),
        site=plan.site,
        scheduler=plan.scheduler,
        gpu_hours=plan.gpu_hours,
        warnings=tuple(warnings),
    )


def run_here(prepared: Prepared, show: Callable[[str], None] | None, say: Callable[[str], None]) -> int:
    """Run job.sh as a child and follow its logs to its end; the exit code is job.sh's.

    Raises UserError where a Slurm site's job is asked for outside of any allocation.
    """
    import signal
    import subprocess

    from slurmddp.report.follow import Follower

    plan = prepared.plan
    job_id = os.environ.get("SLURM_JOB_ID")
    if plan.scheduler == "slurm" and job_id is None:
        raise UserError(
            "this shell is in no Slurm allocation",
            todo=f"salloc --nodes={plan.layout.nodes} first, or `slurmddp submit`, or --site local",
        )
    _refuse_problems(prepared)
    warnings = [*doubts(plan), *_still_going(prepared)]
    folder = make_run_folder(prepared, warnings)
    command = ("bash", str(folder.job_sh), str(folder.path))
    with folder.job_log.open("ab") as log:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=plan.runs_root,
            start_new_session=True,
        )
    kind = "local" if plan.scheduler == "local" else "allocation"
    from slurmddp.slurm.local import job_id_of

    handed_to = job_id if kind == "allocation" and job_id else str(job_id_of(child.pid))
    record(folder, handed_to, kind, command, prepared, warnings)
    for warning in warnings:
        say(f"warning: {warning}")
    say(f"run     {folder.id}\nfolder  {folder.path}")
    follower = Follower(folder)
    # Inside a batch job that is told to end: the run ends with it, in the seconds that are left.
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    asked = 0
    while True:
        try:
            code = child.wait(timeout=0.2)
            break
        except subprocess.TimeoutExpired:
            _show(follower, show)
        except KeyboardInterrupt:
            asked += 1
            say(
                ("asking the ranks to save and end (once more: stop at once)", "stopping", "killing")[min(asked, 3) - 1]
            )
            if asked == 1:
                folder.stop.write_text("interrupted\n", encoding="utf-8")
            elif asked == 2:
                child.terminate()
            else:
                os.killpg(child.pid, signal.SIGKILL)
    _show(follower, show)
    return code if code >= 0 else 128 - code


def make_run_folder(prepared: Prepared, warnings: list[str]) -> RunFolder:
    """The run folder with scripts, snapshot and manifest. Raises UserError with nothing left behind."""
    plan = prepared.plan

    def fill(draft: Draft) -> None:
        _fill(draft, prepared, warnings)

    return create(Path(plan.runs_root), plan.name, {}, fill=fill)


def _fill(draft: Draft, prepared: Prepared, warnings: list[str]) -> None:
    from slurmddp.runs import manifest, snapshot
    from slurmddp.runs.survey import survey

    plan = prepared.plan
    draft.write(run_files(prepared, draft.final.id))
    snapshot.copy_runtime(draft.folder.code_runtime)
    project = Path(plan.program.project) if plan.program.project else None
    if project is not None and plan.snapshot:
        no_code = [Path(place) for place in (plan.runs_root, plan.cache) if place]
        found = survey(project, limit=plan.snapshot_limit, exclude=no_code)
        warnings.extend(found.warnings)
        snapshot.copy_project(found, draft.folder.project)
    image = plan.container.image
    facts = manifest.build(
        draft.final,
        name=plan.name,
        command=sys.argv,
        project=project,
        code_hash=snapshot.code_hash(draft.folder.code),
        image=Path(image) if image else None,
        resumed_from=[str(path) for path in prepared.resumed_from],
        more={"site": plan.site},
    )
    manifest.write(draft.folder, facts)


def record(
    folder: RunFolder,
    job_id: str,
    scheduler: str,
    command: Sequence[str],
    prepared: Prepared,
    warnings: list[str],
) -> None:
    """submission.json and the index; a home that cannot be written costs a warning, not the run."""
    from slurmddp.runs import index, submission

    submission.write(folder, submission.Submission.now(job_id, scheduler, command))
    entry = index.entry_of(folder)
    warning = index.record(entry) if entry else None
    if warning:
        warnings.append(warning)


def _still_going(prepared: Prepared) -> list[str]:
    """A warning where the run that this one continues has not ended."""
    from slurmddp.runs.evidence import evidence
    from slurmddp.runs.state import judge

    for path in prepared.resumed_from[:1]:
        facts = evidence(RunFolder(path))
        try:
            view = scheduler_for(facts.job_id).job(facts.job_id) if facts.job_id else None
        except (ExternalError, UserError):
            return []  # nobody knows; the submission itself will tell what is wrong with Slurm
        state = judge(view, facts)
        if state.going:
            return [f"run {path.name} has not ended ({state.state}): both go on from its newest checkpoint"]
    return []


def _refuse_problems(prepared: Prepared) -> None:
    found = list(problems(prepared))
    if len(found) == 1:
        raise found[0]
    if found:
        raise UserError("\n".join(str(problem) for problem in found))


def _show(follower: Any, show: Callable[[str], None] | None) -> None:
    for line in follower.new_lines():
        if show is not None:
            show(line)
