"""What depends on this machine: is what the job names really there?"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from slurmddp.alerts import secrets
from slurmddp.errors import ElsewhereError, UserError, collecting, together
from slurmddp.images.base import is_sif, sif_architecture
from slurmddp.job.plan.layout import partition_of
from slurmddp.job.plan.model import Plan, Program
from slurmddp.job.plan.program import host_path
from slurmddp.job.site import Site
from slurmddp.launch import accelerate
from slurmddp.launch.job_check.cluster import Cluster
from slurmddp.launch.named_file import batch_line, module_file, near, of_package
from slurmddp.launch.prepare import Prepared
from slurmddp.launch.workdir import absent_workdir
from slurmddp.run.create import refuse_root

if TYPE_CHECKING:
    from slurmddp.images.driver import Verdict

#: The first Slurm that takes --requeue=expedite.
_EXPEDITES = (25, 11)


def refusals(prepared: Prepared, *, program: bool = True) -> list[UserError]:
    """Return why `submit` would refuse the job on this machine, all that can be known without writing.

    program: False if what is wrong with the program is known.
    """
    errors = [*problems(prepared, program=program), *absent_secrets(prepared.plan)]
    with collecting(errors):
        refuse_root(Path(prepared.plan.runs_root), prepared.plan.job.name)
    return errors


def refuse_problems(prepared: Prepared, *, program: bool = True) -> None:
    """Raise one UserError that lists all refusals."""
    if errors := refusals(prepared, program=program):
        raise together(errors)


def unknown_here(plan: Plan, errors: Iterable[UserError]) -> list[UserError]:
    """Return those of the refusals that only a login node of the cluster can tell, where this machine is none."""
    elsewhere = plan.queued and shutil.which("sbatch") is None
    return [error for error in errors if elsewhere and isinstance(error, ElsewhereError)]


def problems(prepared: Prepared, *, program: bool = True) -> Iterator[UserError]:
    """Everything that is missing here, the most likely slip first."""
    plan = prepared.plan
    yield from absent_here(prepared, program=program)
    if plan.site.queues:
        command, todo = ("srun", "run it inside an allocation") if plan.inside else ("sbatch", "use a login node")
        if shutil.which(command) is None:
            yield ElsewhereError(
                f"{command} is not in PATH",
                todo=f"{todo} (or module load slurm); `slurmddp submit --dry-run` shows the scripts anywhere",
            )
    yield from _expedite(plan)
    if any(char in plan.runs_root for char in ':,"\\'):
        todo = "choose another one: --set paths.runs=FOLDER"
        yield UserError(f"the runs folder {plan.runs_root} contains a character that --bind does not accept", todo=todo)


def absent_here(prepared: Prepared, *, program: bool = True) -> Iterator[UserError]:
    """Yield what the job names and this machine lacks, whatever the site. program: as for `refusals`."""
    plan, resolved = prepared.plan, prepared.resolved
    container = resolved.job.container
    of_job = " --job JOB.yaml" if container.recipe or container.base else ""
    yield from _finished(prepared)
    yield from _image(plan, resolved.site, resolved.location("container", "image"), of_job)
    yield from absent_inputs(prepared)
    yield from absent_workdir(prepared)
    inputs = {plan.workdir, *(host for *_, host in _inputs(prepared))}
    for bind in plan.container.binds:
        if not bind.by_site and bind.source not in inputs and not os.path.exists(bind.source):
            yield ElsewhereError(
                f"the bind source {bind.source} does not exist",
                where=resolved.location("container", "binds"),
                todo="correct the path, or create the folder",
            )
    if program:
        yield from _program(prepared)
    yield from accelerate.problems(prepared)


def _expedite(plan: Plan) -> Iterator[UserError]:
    """`requeue: expedite` of the profile where Slurm says that it cannot: sbatch's own message names no key."""
    config = Cluster().config if plan.recovery.expedite else None
    if config is None:  # nobody knows; sbatch will tell
        return
    match = re.match(r"(\d+)\.(\d+)", text := config.get("SLURM_VERSION", ""))
    if match and (int(match[1]), int(match[2])) < _EXPEDITES:
        reason = f"needs Slurm 25.11, and this cluster has {text}"
    elif "enable_expedited_requeue" not in config.get("SlurmctldParameters", "enable_expedited_requeue").lower():
        reason = "is off on this cluster: its SlurmctldParameters have no enable_expedited_requeue"
    else:
        return
    todo = "write `requeue: allowed` in the profile"
    yield UserError(f"requeue: expedite {reason}", where=f"site {plan.site.name}", todo=todo)


def _finished(prepared: Prepared) -> Iterator[UserError]:
    """A resumed run that has done all its steps would start its nodes and train nothing."""
    job, newest = prepared.plan.runtime_job, prepared.resumed.newest_checkpoint()
    if job and newest and newest[0] >= job["train"]["steps"]:
        step, path = newest
        yield UserError(
            f"nothing is left to train: {path.parent.parent.name} has a checkpoint of step {step}, and the job ends at "
            f"step {job['train']['steps']}",
            where=prepared.resolved.location("train", "steps"),
            todo=f"add steps: --set train.steps=N, with N above {step}",
        )


def absent_inputs(prepared: Prepared) -> Iterator[UserError]:
    """Yield the inputs that are not on this machine: the dataset, and the weights that it starts from."""
    for label, key, path, host in _inputs(prepared):
        if not os.path.exists(host):
            seen = f" ({host} on this machine)" if host != path else ""
            todo = "correct the path (relative paths start at the current directory), or add a bind"
            yield ElsewhereError(
                f"{label} {path}{seen} does not exist", where=prepared.resolved.location(*key), todo=todo
            )


def absent_secrets(plan: Plan) -> Iterator[UserError]:
    """Yield what `submit` would reject about alert addresses and variables. The environment stays as it is."""
    project = plan.program.project if plan.job.snapshot else None
    for target in plan.alerts.targets if plan.alerts else ():
        try:
            secrets.take((target,), dict(os.environ), project)
        except UserError as error:
            yield error
    try:
        secrets.take_variables(plan.job.environment_from, dict(os.environ))
    except UserError as error:
        yield error


def _inputs(prepared: Prepared) -> Iterator[tuple[str, tuple[str, ...], str, str]]:
    """Yield what it is, its key, its path in the container, and its path on this machine."""
    plan = prepared.plan
    given: list[tuple[str, tuple[str, ...], str]] = [
        ("the dataset", ("train", "data", "path"), path) for path in plan.data_paths
    ]
    weights = plan.runtime_job["train"]["init_from"] if plan.runtime_job else None
    if weights is not None:
        given.append(("the weights", ("train", "init_from"), weights))
    for label, key, path in given:
        yield label, key, path, host_path(path, plan.container.binds)


def driver_verdict(prepared: Prepared) -> Verdict | None:
    """Return whether the GPUs and the driver in the profile run the CUDA in the image's lock file.

    None where NVIDIA's driver has no part in the job, or nothing is known of it or of the image's CUDA. Without a
    driver, only a GPU that this CUDA has no code for is reported.
    """
    plan, resolved = prepared.plan, prepared.resolved
    partition = partition_of(resolved)
    driver = partition.driver or resolved.site.driver
    uses_it = plan.layout.gpus_per_node > 0 and resolved.site.gpu_vendor == "nvidia"
    if not uses_it or not plan.container.image or not os.path.isfile(plan.container.image):
        return None
    from slurmddp.images.driver import check, without_code
    from slurmddp.images.inventory import shelved

    gpu = resolved.job.resources.gpu_type or partition.gpu_type
    cuda = shelved(Path(plan.container.image)).cuda
    if driver is None or cuda.cuda is None:
        return without_code(cuda, gpu)
    return check(cuda, driver, gpu=gpu)


def _image(plan: Plan, site: Site, where: str, of_job: str) -> Iterator[UserError]:
    image = plan.container.image
    if image is None:
        return
    if not os.path.exists(image):
        todo = f"build it: slurmddp build-image{of_job}"
        yield ElsewhereError(f"the image {image} does not exist", where=where, todo=todo)
    elif not plan.container.takes_sif:
        return  # such as a squashfs file of enroot's
    elif os.path.isfile(image) and not is_sif(Path(image)):
        todo = "set container.image to a .sif file, or build or copy this one again"
        yield UserError(f"{image} is not a SIF image", where=where, todo=todo)
    elif os.path.isfile(image) and (architecture := _foreign(Path(image), site)):
        yield UserError(
            f"{image} is for {architecture}, but the nodes of site {site.name} are {site.architecture}",
            where=where,
            todo=f"build it on a machine that is {site.architecture}: slurmddp build-image --on-node",
        )
    elif os.path.isdir(image) and not os.path.isdir(os.path.join(image, "usr")):
        todo = "set container.image to a .sif file"
        yield UserError(f"{image} is a folder, but not a root file system", where=where, todo=todo)


def _foreign(image: Path, site: Site) -> str | None:
    """Return the image's architecture if the site's nodes are known to have another one."""
    architecture = sif_architecture(image)
    runs = {"x86_64": ("amd64", "386"), "aarch64": ("arm64",)}.get(site.architecture or "", (architecture,))
    return None if architecture is None or architecture in runs else architecture


def _program(prepared: Prepared) -> Iterator[UserError]:
    plan, program = prepared.plan, prepared.plan.program
    where = prepared.resolved.location("train", "script")
    if plan.workdir and plan.container.image and _belongs_to_the_system(plan.workdir):
        yield UserError(
            f"the job would run in {plan.workdir}, which would hide the folder of the same name in the image",
            todo="submit from one of your own folders",
        )
    if program.project is not None and not os.path.isdir(program.project):
        yield UserError(
            f"the project folder {program.project} does not exist",
            where=prepared.resolved.location("train", "project"),
            todo="correct the path",
        )
    elif program.module:
        folder = program.project or plan.cwd
        package = os.path.join(folder, program.module.split(".")[0])
        if os.path.isfile(f"{package}/__init__.py") and module_file(folder, program.module) is None:
            yield UserError(
                f"the package {package} has no module {program.module} that Python can start",
                where=prepared.resolved.location("train", "module"),
                todo="correct its name; a package needs a __main__.py",
            )
    elif error := absent_script(program, where):
        yield error
    elif program.bash and (line := batch_line(Path(program.source))):
        yield UserError(
            f"{program.source} is a batch script (line {line}): slurmddp would run it on each rank",
            where=where,
            todo="convert it to a job file: slurmddp import FILE -o job.yaml",
        )
    elif program.script and not program.bash and (module := of_package(Path(program.source))):
        cd = "" if str(module.folder) == plan.cwd else f"cd {shlex.quote(str(module.folder))}, then "
        yield UserError(
            f"{program.source} has a relative import in line {module.line}: Python can only start it as a module",
            where=where,
            todo=f"{cd}-m {module.module} in place of the script; in a job file: train: {{module: {module.module}}}",
        )


def absent_script(program: Program, where: str) -> UserError | None:
    if not program.script or os.path.isfile(program.source):
        return None
    todo = near(Path(program.source)) or "correct its path"
    return UserError(f"the script {program.source} does not exist", where=where, todo=todo)


def _belongs_to_the_system(folder: str) -> bool:
    first = folder.strip("/").split("/")[0]
    return first in {"", "bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "proc", "run", "sbin", "sys", "usr"}
