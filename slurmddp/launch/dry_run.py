"""What `submit --dry-run` shows: what a submission would write and run, and why it would be refused. Writes nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from slurmddp.assets import package_folder
from slurmddp.errors import UserError, each_once, together
from slurmddp.job.sensitive import refuse_values
from slurmddp.launch.avoid import avoid
from slurmddp.launch.facts import plan_facts
from slurmddp.launch.job_check.rule import advice
from slurmddp.launch.prepare import Prepared
from slurmddp.launch.problems import refusals, unknown_here
from slurmddp.launch.submit import command_line, still_going
from slurmddp.launch.workdir import files_before, relative_paths, shared_files
from slurmddp.launch.write import run_files, survey_project
from slurmddp.run import snapshot
from slurmddp.run.layout import RunFolder
from slurmddp.run.survey import Survey

#: Stands for the id of the run, which only a submission makes.
RUN_ID = "RUN_ID"


class DryRun(NamedTuple):
    """What a submission would come to.

    command:    the words that would hand the job over.
    scripts:    name -> text of what is rendered for this job: job.sh, node.sh, and payloads/NAME of each alert target.
    machinery:  path in the run folder -> text of the shell functions that the scripts source.
    code_hash:  as manifest.json would have it; None where the project cannot be copied.
    refusals:   why `submit` would refuse the job.
    unchecked:  what only a login node of the cluster can tell; this machine has no sbatch.
    """

    folder: RunFolder
    command: tuple[str, ...]
    scripts: dict[str, str]
    machinery: dict[str, str]
    code_hash: str | None
    warnings: tuple[str, ...]
    refusals: tuple[UserError, ...]
    unchecked: tuple[UserError, ...] = ()

    @property
    def machinery_source(self) -> Path:
        """Return where the shell functions are now."""
        return package_folder() / "shell"

    def as_dict(self, prepared: Prepared) -> dict[str, Any]:
        """Return the dry run for --json; docs/files.md has the keys."""
        plan, refusal = prepared.plan, together(self.refusals) if self.refusals else None
        return {
            **plan_facts(plan),
            "run_folder": str(self.folder.path),
            "command": list(self.command),
            "scripts": self.scripts,
            "machinery": {
                "path": str(self.folder.code_archive),
                "source": str(self.machinery_source),
                "code_hash": self.code_hash,
                "files": self.machinery,
            },
            "warnings": [*(note.text for note in plan.notes), *self.warnings],
            "unchecked": [str(error) for error in self.unchecked],
            "refusal": None if refusal is None else str(refusal),
        }


def dry_run(prepared: Prepared, refused: UserError | None = None) -> DryRun:
    """Check what `submit` checks, and collect what it would write.

    refused: why the job could not even be prepared as `submit` prepares it.
    Raises UserError where nothing may be shown: a secret stands in one of the files.
    """
    plan = prepared.plan
    files = run_files(prepared, RUN_ID)
    found_here = each_once([*(refused.parts if refused else ()), *refusals(prepared, program=refused is None)])
    unchecked = unknown_here(plan, found_here)
    refused_here = [error for error in found_here if error not in unchecked]
    variables = {name: os.environ[name] for name in plan.environment_from if os.environ.get(name)}
    try:
        refuse_values(variables, files)
    except UserError as error:
        raise together([*refused_here, error]) from None
    avoided = avoid(prepared)
    warnings = [
        *advice(prepared),
        *shared_files(plan, files_before(prepared)),
        *relative_paths(plan),
        *still_going(prepared),
        *avoided.warnings,
    ]
    found: Survey | None = None
    code_hash = None
    try:
        found = survey_project(plan)
        code_hash = snapshot.hash_of(found)
    except UserError as error:
        if not refused_here:  # one of them may be the same: a project that is not there
            refused_here.append(error)
    folder = RunFolder(Path(plan.runs_root) / RUN_ID)
    return DryRun(
        folder,
        command_line(plan, folder, avoided.options),
        {name: text for name, text in files.items() if name in ("job.sh", "node.sh") or name.startswith("payloads/")},
        {name: path.read_text("utf-8") for name, path in snapshot.machinery().items()},
        code_hash,
        (*warnings, *(found.warnings if found else ())),
        tuple(refused_here),
        tuple(unchecked),
    )
