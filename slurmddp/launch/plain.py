"""`slurmddp submit --plain`: write an ordinary sbatch script, and submit it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from slurmddp.alerts import secrets
from slurmddp.cluster.client import Slurm
from slurmddp.errors import UserError, each_once, together
from slurmddp.launch.new_file import write_new
from slurmddp.launch.prepare import Prepared
from slurmddp.launch.problems import problems, unknown_here
from slurmddp.render.plain import missing, plain_script


class PlainJob(NamedTuple):
    """missing: what the supervised job does and this one does not. job_id: None in a dry run, as is the log."""

    file: str
    script: str
    missing: tuple[str, ...]
    job_id: str | None = None
    log: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return it for --json."""
        number = (self.job_id or "").partition(";")[0]
        next_ = [f"squeue --job={number}", f"scancel {number}", f"slurmddp doctor {self.log}"] if number else []
        return {**self._asdict(), "missing": list(self.missing), "next": next_ or [f"sbatch {self.file}"]}


def plain_job(prepared: Prepared, refused: UserError | None, *, submit: bool) -> PlainJob:
    """Render the script and, with `submit`, write it to this folder and submit it.

    refused: why the job could not be prepared. Raises UserError, ExternalError.
    """
    plan = prepared.plan
    errors = each_once([*(refused.parts if refused else ()), *problems(prepared, program=refused is None)])
    unchecked = [] if submit else unknown_here(plan, errors)
    if errors := [error for error in errors if error not in unchecked]:
        raise together(errors)
    path = Path(f"{plan.name}.sbatch")
    text = plain_script(plan, path.name)
    found = PlainJob(path.name, text, tuple(missing(plan)))
    if not submit:
        return found
    secrets.take_variables(plan.environment_from, dict(os.environ))  # sbatch hands them on: only looked at
    if not path.is_file() or path.read_bytes() != text.encode("utf-8", errors="surrogateescape"):
        todo = f"`sbatch {path}` submits it as it is; remove it, or choose another name with --name"
        write_new(path, text, todo=todo)
    job_id = str(Slurm().submit(Slurm.sbatch_command((), path.name, ()), Path.cwd()))
    return found._replace(job_id=job_id, log=str(Path.cwd() / f"{plan.name}-{job_id.partition(';')[0]}.log"))
