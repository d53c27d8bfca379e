"""`slurmddp build-image`: what the site says of builds, and the build."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

from slurmddp.errors import UserError
from slurmddp.images.make import Rules
from slurmddp.images.recipe import read_recipe
from slurmddp.images.registry.settings import RegistrySettings
from slurmddp.images.wanted import Wanted, of_dockerfile, of_recipe
from slurmddp.sites.catalogue import Catalogue
from slurmddp.sites.detect import detect
from slurmddp.spec.expand import Expander, Unexpanded


def wanted_image(
    recipe: str | None,
    dockerfile: Path | None,
    arguments: Sequence[str],
    stage: str | None,
    options: Mapping[str, object],
    cwd: Path,
    environment: Mapping[str, str],
) -> Wanted:
    """What the command line names: a Dockerfile with its arguments (NAME=VALUE) and stage, or a recipe under `options`.

    Raises UserError where it names nothing, both, or what does not go together.
    """
    given = [f"--{name}" for name, value in options.items() if value]
    if dockerfile is None:
        if arguments or stage:
            raise UserError("--build-arg and --stage are for a Dockerfile", todo="name it by --dockerfile FILE")
        if recipe is None and not options.get("base"):
            bases = "an NGC release, docker://REF, a .sif, a root folder"
            todo = f"--recipe ngc-pytorch, or --base 25.04 ({bases}), or --dockerfile FILE"
            raise UserError("nothing says what the image is made from", todo=todo)
        return of_recipe(read_recipe(recipe, options, cwd, environment))
    if recipe is not None or given:
        other = "--recipe" if recipe is not None else given[0]
        raise UserError(f"--dockerfile and {other} exclude each other", todo="leave one out")
    pairs = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not equals:  # as docker does: the value of the environment
            value = environment.get(name, "")
        pairs[name] = value
    return of_dockerfile(cwd / dockerfile, pairs, stage)


def rules_of(site: str | None, environment: Mapping[str, str] = os.environ) -> Rules:
    """The rules of the site that is named, by --site or SLURMDDP_SITE, or that this host belongs to; else none.

    Raises UserError for a site that is unknown or wrong.
    """
    catalogue = Catalogue(environment)
    name = site or environment.get("SLURMDDP_SITE")
    if name is None:
        found = detect(catalogue, platform.node(), environment)
        if found is None:
            return Rules()
        name = found[0]
    profile, layer = catalogue.load(name)
    paths = layer.tree.get("paths") or {}
    written = profile.images.cache or paths.get("cache")
    cache = Expander(environment).text(str(written), ("paths", "cache")) if written else None
    runtime = (layer.tree.get("container") or {}).get("runtime")
    return Rules(
        prefer=str(runtime) if runtime in ("apptainer", "singularity") else None,
        # A variable that is not set here: the builder's own places are better than a folder of that name.
        cache=Path(cache).absolute() if cache and not isinstance(cache, Unexpanded) else None,
        processors=profile.images.processors,
        memory=profile.images.memory,
        registries=RegistrySettings(
            profile.images.proxy, dict(profile.images.mirrors), frozenset(profile.images.insecure)
        ),
    )


def used_images() -> list[Path]:
    """The images of all runs in the user's index whose folders are still there: a run may be resumed at any time."""
    from slurmddp.runs import index, manifest

    found = []
    for entry in index.entries():
        try:
            image = manifest.read(entry.folder).get("image")
        except UserError:
            continue  # a folder of the index's that is no run's any more
        if isinstance(image, dict) and image.get("path"):
            found.append(Path(str(image["path"])))
    return found
