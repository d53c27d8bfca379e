"""What depends on this machine: is what the job names really there?"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from slurmddp.alerts import secrets
from slurmddp.errors import UserError
from slurmddp.images.sif import is_sif
from slurmddp.launch.prepare import Prepared
from slurmddp.plan.layout import partition_of
from slurmddp.plan.model import Plan
from slurmddp.plan.program import host_path

if TYPE_CHECKING:
    from slurmddp.images.driver import Verdict


def problem(prepared: Prepared) -> UserError | None:
    """One error that lists all that is missing on this machine; None where nothing is."""
    found = list(problems(prepared))
    if len(found) > 1:
        return UserError("\n".join(str(each) for each in found))
    return found[0] if found else None


def problems(prepared: Prepared) -> Iterator[UserError]:
    """Everything that is missing here, the most likely slip first."""
    plan, resolved = prepared.plan, prepared.resolved
    said = resolved.job.container
    of_job = " --job JOB.yaml" if said.recipe or said.base else ""
    yield from _image(plan, resolved.location("container", "image"), of_job)
    yield from absent_inputs(prepared)
    told = {host for *_, host in _inputs(prepared)}
    for bind in plan.container.binds:
        if not bind.by_site and bind.source not in told and not os.path.exists(bind.source):
            yield UserError(
                f"the bind source {bind.source} does not exist",
                where=resolved.location("container", "binds"),
                todo="correct it, or make the folder",
            )
    yield from _program(prepared)
    if plan.scheduler == "slurm":
        command, todo = ("srun", "run it inside an allocation") if plan.inside else ("sbatch", "go to a login node")
        if shutil.which(command) is None:
            yield UserError(
                f"{command} is not in PATH",
                todo=f"{todo} (or module load slurm); --dry-run shows the scripts anywhere",
            )
    if any(char in plan.runs_root for char in ':,"\\'):
        yield UserError(
            f"the folder of the runs, {plan.runs_root}, holds a character that --bind cannot carry",
            todo="--set paths.runs=FOLDER",
        )


def absent_inputs(prepared: Prepared) -> Iterator[UserError]:
    """What the job reads and is not on this machine: the dataset, and the weights that it starts from."""
    for what, key, path, host in _inputs(prepared):
        if not os.path.exists(host):
            seen = f" ({host} on this machine)" if host != path else ""
            yield UserError(
                f"{what} {path}{seen} does not exist",
                where=prepared.resolved.location(*key),
                todo="correct it (relative paths start at the directory you are in), or add a bind",
            )


def absent_secrets(plan: Plan) -> Iterator[UserError]:
    """What `submit` would refuse about addresses of alerts and variables; nothing is taken out of the environment."""
    project = plan.program.project if plan.snapshot else None
    for target in plan.alerts.targets if plan.alerts else ():
        try:
            secrets.take((target,), dict(os.environ), project)
        except UserError as error:
            yield error
    try:
        secrets.take_variables(plan.environment_from, dict(os.environ))
    except UserError as error:
        yield error


def _inputs(prepared: Prepared) -> Iterator[tuple[str, tuple[str, ...], str, str]]:
    """What it is, its key, its path in the container, and that on this machine."""
    plan = prepared.plan
    given: list[tuple[str, tuple[str, ...], str]] = [
        ("the dataset", ("train", "data", "path"), path) for path in plan.data_paths
    ]
    weights = plan.runtime_job["train"]["init_from"] if plan.runtime_job else None
    if weights is not None:
        given.append(("the file or folder of weights", ("train", "init_from"), weights))
    for what, key, path in given:
        yield what, key, path, host_path(path, plan.container.binds)


def doubts(prepared: Prepared) -> Iterator[str]:
    """What may be right all the same: a bind of the site's that only its compute nodes have, a driver that is too old
    by what the profile says of it."""
    if prepared.plan.scheduler == "local" and "SLURM_JOB_ID" not in os.environ and shutil.which("sbatch"):
        yield "site local trains on this machine; on a login node, choose your cluster's site, or --site generic"
    verdict = driver_verdict(prepared)
    if verdict is not None and verdict.kind not in ("native", "minor"):
        yield f"the image on the driver of these nodes: {verdict.why}" + (f"; {verdict.todo}" if verdict.todo else "")
    for bind in prepared.plan.container.binds:
        if bind.by_site and not os.path.exists(bind.source):
            yield f"the site's bind source {bind.source} does not exist on this machine; do the compute nodes have it?"


def driver_verdict(prepared: Prepared) -> Verdict | None:
    """Whether the nodes' driver, as the profile has it, runs the image's CUDA, as its lock has it.

    None where NVIDIA's driver has no part in the job, or nothing is known of it or of the image's CUDA.
    """
    plan, resolved = prepared.plan, prepared.resolved
    partition = partition_of(resolved)
    driver = partition.driver or resolved.site.driver
    uses_it = plan.layout.gpus_per_node > 0 and resolved.site.gpu_vendor == "nvidia"
    if driver is None or not uses_it or not plan.container.image or not os.path.isfile(plan.container.image):
        return None
    from slurmddp.images.driver import check
    from slurmddp.images.inventory import shelved

    gpu = resolved.job.resources.gpu_type or partition.gpu_type
    cuda = shelved(Path(plan.container.image)).cuda
    return check(cuda, driver, gpu=gpu) if cuda.cuda is not None else None


def _image(plan: Plan, where: str, of_job: str) -> Iterator[UserError]:
    image = plan.container.image
    if image is None:
        return
    if not os.path.exists(image):
        yield UserError(f"the image {image} does not exist", where=where, todo=f"slurmddp build-image{of_job} makes it")
    elif os.path.isfile(image) and not is_sif(Path(image)):
        yield UserError(
            f"{image} is no SIF image", where=where, todo="name a .sif file; build or copy it again if it is one"
        )
    elif os.path.isdir(image) and not os.path.isdir(os.path.join(image, "usr")):
        yield UserError(f"{image} is a folder, and no root file system", where=where, todo="name a .sif file")


def _program(prepared: Prepared) -> Iterator[UserError]:
    plan, program = prepared.plan, prepared.plan.program
    where = prepared.resolved.location("train", "script")
    if plan.workdir and plan.container.runtime != "none" and _belongs_to_the_system(plan.workdir):
        yield UserError(
            f"the job would run in {plan.workdir}, which would hide the image's own",
            todo="submit from a folder of yours",
        )
    if program.project is not None and not os.path.isdir(program.project):
        yield UserError(
            f"the project folder {program.project} does not exist",
            where=prepared.resolved.location("train", "project"),
            todo="correct it",
        )
    elif program.script:
        script = program.script
        if program.in_snapshot and program.project is not None:
            script = os.path.join(program.project, script.removeprefix("code/project/"))
        if not os.path.isfile(script):
            yield UserError(f"the script {script} does not exist", where=where, todo="correct its path")


def _belongs_to_the_system(folder: str) -> bool:
    first = folder.strip("/").split("/")[0]
    return first in {"", "bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "proc", "run", "sbin", "sys", "usr"}
