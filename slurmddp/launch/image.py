"""`slurmddp build-image`: what the site says of builds, and the build."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from slurmddp.container import SIF_PROGRAMS
from slurmddp.errors import UserError
from slurmddp.images.context.staging import read_secrets
from slurmddp.images.image_spec import Wanted, of_dockerfile, of_recipe
from slurmddp.images.make import Rules
from slurmddp.images.registry.settings import RegistrySettings

if TYPE_CHECKING:  # profiles and recipes bring pydantic, which a Dockerfile's definition does not need
    from slurmddp.job.document import Document
    from slurmddp.job.site import Site


def wanted_image(
    recipe: str | None,
    dockerfile: Path | None,
    arguments: Sequence[str],
    stage: str | None,
    options: Mapping[str, object],
    cwd: Path,
    environment: Mapping[str, str],
    *,
    context: Path | None = None,
    secrets: Sequence[str] = (),
    allow_files: bool = False,
) -> Wanted:
    """Return the image of the command line: a Dockerfile, its arguments (NAME=VALUE), its stage; or a recipe's options.

    context: the folder that the Dockerfile's COPY takes from; secrets: as --secret has them.
    allow_files: the recipe may copy files from outside of its folder. Raises UserError where the command line names
    nothing, both, or what does not go together.
    """
    given = [f"--{name}" for name, value in options.items() if value]
    if dockerfile is None:
        if arguments or stage or context or secrets:
            todo = "add --dockerfile FILE"
            raise UserError("--build-arg, --stage, --context and --secret need a Dockerfile", todo=todo)
        if recipe is None and not options.get("base"):
            bases = "an NGC release, docker://REF, a .sif, a root folder"
            todo = f"use --recipe ngc-pytorch, --base 25.04 ({bases}), or --dockerfile FILE"
            raise UserError("no base, recipe or Dockerfile given", todo=todo)
        from slurmddp.images.recipe import read_recipe

        return of_recipe(read_recipe(recipe, options, cwd, environment, allow_files=allow_files))
    if recipe is not None or given:
        other = "--recipe" if recipe is not None else given[0]
        raise UserError(f"--dockerfile and {other} cannot be combined", todo="remove one")
    split = (argument.partition("=") for argument in arguments)  # NAME alone: the environment's value, as docker does
    pairs = {name: value if equals else environment.get(name, "") for name, equals, value in split}
    hidden = read_secrets(secrets, cwd, environment)
    return of_dockerfile(cwd / dockerfile, pairs, stage, cwd / context if context else None, hidden)


class OfJob(NamedTuple):
    """What a job says of its image. target: container.image; site: where it was found that the job runs."""

    recipe: str | None
    base: str | None
    pip: tuple[str, ...]
    target: Path | None
    site: str


def image_of_job(job: Path) -> OfJob:
    """Return what `build-image --job` builds. Raises UserError for a mistake in the job, or if it has no recipe."""
    from slurmddp.job.resolve import Request
    from slurmddp.launch.prepare import resolved_job

    resolved = resolved_job(Request(str(job)))
    container = resolved.job.container
    if container.recipe is None and container.base is None:
        todo = "set container: {recipe: ngc-pytorch}, or {base: 25.04}"
        raise UserError("neither container.recipe nor container.base is set", where=str(job), todo=todo)
    target = Path(container.image) if container.image else None
    return OfJob(container.recipe, container.base, container.pip, target, resolved.site.name)


def commit_of(folder: Path) -> str | None:
    """Return the commit of a folder, with "-dirty" if files differ; None without git, or outside a repository."""
    from slurmddp.run import git

    try:
        state = git.state(folder)
    except git.GitError:
        return None
    if state is None or state.commit is None:
        return None
    return state.commit + ("-dirty" if state.dirty else "")


def named_site(site: str | None, environment: Mapping[str, str]) -> tuple[str, Site, Document] | None:
    """Return name, profile and job layer of the selected site; None if none is selected.

    Raises UserError for one that is unknown or wrong.
    """
    from slurmddp.sites.catalogue import Catalogue
    from slurmddp.sites.detect import select

    catalogue = Catalogue(environment)
    selection = select(catalogue, environment, site)
    return (selection[0], *catalogue.load(selection[0])) if selection else None


def rules_of(site: str | None, environment: Mapping[str, str] = os.environ) -> Rules:
    """The rules of the site that is named, by --site or SLURMDDP_SITE, or that this host belongs to; else none.

    Raises UserError for a site that is unknown or wrong.
    """
    from slurmddp.job.expand import Expander, Unexpanded

    named = named_site(site, environment)
    of_job = _of_this_job(environment)
    if named is None:
        return Rules(processors=of_job[0], memory=of_job[1]) if of_job else Rules()
    _, profile, layer = named
    paths = layer.tree.get("paths") or {}
    written = profile.images.cache or paths.get("cache")
    cache = Expander(environment).text(str(written), ("paths", "cache")) if written else None
    runtime = (layer.tree.get("container") or {}).get("runtime")
    processors, memory = of_job or (profile.images.processors, profile.images.memory)
    return Rules(
        prefer=str(runtime) if runtime in SIF_PROGRAMS else None,
        # A variable that is not set here: the builder's own places are better than a folder of that name.
        cache=Path(cache).absolute() if cache and not isinstance(cache, Unexpanded) else None,
        processors=processors,
        memory=memory,
        registries=RegistrySettings(
            profile.images.proxy, dict(profile.images.mirrors), frozenset(profile.images.insecure)
        ),
    )


def _of_this_job(environment: Mapping[str, str]) -> tuple[int, int | None] | None:
    """Processors, and MiB for mksquashfs, on a node of a Slurm job; None elsewhere: a login node's limits hold there.

    By itself it takes a quarter of the node's memory, whatever the job was given. SLURMD_NODENAME is set on nodes
    alone, not in salloc's shell on a login node.
    """
    processors = environment.get("SLURM_CPUS_ON_NODE", "")
    if "SLURMD_NODENAME" not in environment or not processors.isdecimal():
        return None
    whole, each = (environment.get(f"SLURM_MEM_PER_{word}", "") for word in ("NODE", "CPU"))
    memory = int(whole) if whole.isdecimal() else int(each) * int(processors) if each.isdecimal() else 0
    return int(processors), memory // 2 or None  # the other half is for the pages that it reads and writes


def used_images() -> list[Path]:
    """Return the images of all indexed runs whose folders exist: they may be resumed at any time."""
    from slurmddp.run import index, manifest

    paths = []
    for entry in index.entries():
        try:
            image = manifest.read(entry.folder).get("image")
        except UserError:
            continue  # a folder of the index's that is no run's any more
        if isinstance(image, dict) and image.get("path"):
            paths.append(Path(str(image["path"])))
    return paths
