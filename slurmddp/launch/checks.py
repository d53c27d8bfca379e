"""What depends on this machine: is what the job names really there? Errors in submit, warnings in a dry run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

from slurmddp.errors import UserError
from slurmddp.plan.model import Plan
from slurmddp.plan.program import host_path


def problems(plan: Plan) -> Iterator[UserError]:
    """Everything that is missing here, the most likely slip first."""
    yield from _image(plan)
    for bind in plan.container.binds:
        if not bind.by_site and not os.path.exists(bind.source):
            yield UserError(f"the bind source {bind.source} does not exist", todo="correct it, or make the folder")
    for path in plan.data_paths:
        host = host_path(path, plan.container.binds)
        if not os.path.exists(host) and not any(bind.source == host for bind in plan.container.binds):
            seen = f" ({host} on this machine)" if host != path else ""
            yield UserError(f"the dataset {path}{seen} does not exist", todo="correct train.data.path, or add a bind")
    yield from _program(plan)
    if plan.scheduler == "slurm":
        command, todo = ("srun", "run it inside an allocation") if plan.inside else ("sbatch", "go to a login node")
        if shutil.which(command) is None:
            yield UserError(
                f"{command} is not on this machine",
                todo=f"{todo} (or module load slurm); --dry-run works anywhere",
            )
    if any(char in plan.runs_root for char in ':,"\\'):
        yield UserError(
            f"the folder of the runs, {plan.runs_root}, holds a character that --bind cannot carry",
            todo="--set paths.runs=FOLDER",
        )


def doubts(plan: Plan) -> Iterator[str]:
    """What may be right all the same: a bind of the site's that only its compute nodes have."""
    for bind in plan.container.binds:
        if bind.by_site and not os.path.exists(bind.source):
            yield f"the site's bind source {bind.source} does not exist on this machine; do the compute nodes have it?"


def _image(plan: Plan) -> Iterator[UserError]:
    image = plan.container.image
    if image is None:
        return
    if not os.path.exists(image):
        yield UserError(f"the image {image} does not exist", todo="slurmddp build-image makes one")
    elif os.path.isfile(image) and os.path.getsize(image) == 0:
        yield UserError(f"the image {image} is empty", todo="build or copy it again")


def _program(plan: Plan) -> Iterator[UserError]:
    program = plan.program
    if program.project is not None and not os.path.isdir(program.project):
        yield UserError(f"the project folder {program.project} does not exist", todo="correct train.project")
    elif program.script:
        script = program.script
        if program.in_snapshot and program.project is not None:
            script = os.path.join(program.project, script.removeprefix("code/project/"))
        if not os.path.isfile(script):
            yield UserError(f"the script {script} does not exist", todo="correct its path")
