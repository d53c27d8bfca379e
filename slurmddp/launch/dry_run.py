"""What `submit --dry-run` shows: what a submission would write and run, and why it would be refused. Writes nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from slurmddp.assets import package_folder
from slurmddp.errors import UserError
from slurmddp.launch.avoid import avoid
from slurmddp.launch.job_check.rule import advice
from slurmddp.launch.prepare import Prepared
from slurmddp.launch.problems import absent_secrets, problem
from slurmddp.launch.submit import command_line, still_going
from slurmddp.launch.write import run_files, survey_project
from slurmddp.runs import snapshot
from slurmddp.runs.create import refuse_root
from slurmddp.runs.layout import RunFolder
from slurmddp.runs.survey import Survey
from slurmddp.spec.sensitive import refuse_values

#: Stands for the id of the run, which only a submission makes.
RUN_ID = "RUN_ID"


class DryRun(NamedTuple):
    """What a submission would come to.

    command:    the words that would hand the job over.
    scripts:    name -> text of what is rendered for this job: job.sh, node.sh, and payloads/NAME of each alert target.
    machinery:  path in the run folder -> text of the shell functions that the scripts source.
    code_hash:  as manifest.json would have it; None where the project cannot be copied.
    refusals:   why `submit` would refuse the job; it tells the first.
    """

    folder: RunFolder
    command: tuple[str, ...]
    scripts: dict[str, str]
    machinery: dict[str, str]
    code_hash: str | None
    warnings: tuple[str, ...]
    refusals: tuple[UserError, ...]

    @property
    def machinery_source(self) -> Path:
        """Return where the shell functions are now."""
        return package_folder() / "shell"

    def as_dict(self, prepared: Prepared) -> dict[str, Any]:
        """Return the dry run for --json; docs/files.md has the keys."""
        plan, refusal = prepared.plan, next(iter(self.refusals), None)
        batch = plan.batch._asdict() if plan.batch else {}
        return {
            "name": plan.name,
            "site": plan.site,
            "scheduler": plan.scheduler,
            "nodes": {"min": plan.nodes.min, "max": plan.nodes.max, "spares": plan.nodes.spares},
            "ranks": {"total": plan.nodes.world, "per_node": plan.nodes.ranks_per_node},
            "batch": {"global": batch.pop("total"), **batch} if batch else None,
            "time": plan.time,
            "image": plan.container.image,
            "gpu_hours": plan.gpu_hours,
            "run_folder": str(self.folder.path),
            "command": list(self.command),
            "scripts": self.scripts,
            "machinery": {
                "path": str(self.folder.shell),
                "source": str(self.machinery_source),
                "code_hash": self.code_hash,
                "files": self.machinery,
            },
            "warnings": [*(note.text for note in plan.notes), *self.warnings],
            "refusal": None if refusal is None else str(refusal),
        }


def dry_run(prepared: Prepared, refused: UserError | None = None) -> DryRun:
    """Check what `submit` checks, and collect what it would write.

    refused: why the job could not even be prepared as `submit` prepares it.
    Raises UserError where nothing may be shown: a secret stands in one of the files.
    """
    plan = prepared.plan
    files = run_files(prepared, RUN_ID)
    refusals = [*([refused] if refused else ()), *_refusals(prepared)]
    variables = {name: os.environ[name] for name in plan.environment_from if os.environ.get(name)}
    try:
        refuse_values(variables, files)
    except UserError as error:
        raise (refusals or [error])[0] from None
    avoided = avoid(prepared)
    warnings = [*advice(prepared), *still_going(prepared), *avoided.warnings]
    found: Survey | None = None
    code_hash = None
    try:
        found = survey_project(plan)
        code_hash = snapshot.hash_of(found)
    except UserError as error:
        if not refusals:  # the first refusal may be the same: a project that is not there
            refusals.append(error)
    folder = RunFolder(Path(plan.runs_root) / RUN_ID)
    return DryRun(
        folder,
        command_line(plan, folder, avoided.options),
        {name: text for name, text in files.items() if name in ("job.sh", "node.sh") or name.startswith("payloads/")},
        {f"code/slurmddp/{name}": path.read_text("utf-8") for name, path in snapshot.machinery()},
        code_hash,
        (*warnings, *(found.warnings if found else ())),
        tuple(refusals),
    )


def _refusals(prepared: Prepared) -> Iterator[UserError]:
    """Return the refusals in the order of `submit`."""
    plan = prepared.plan
    if (found := problem(prepared)) is not None:
        yield found
    yield from absent_secrets(plan)
    try:
        refuse_root(Path(plan.runs_root), plan.name)
    except UserError as error:
        yield error
