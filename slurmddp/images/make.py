"""What `slurmddp build-image` does, without its options and its printing."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmddp import __version__
from slurmddp.errors import UserError
from slurmddp.images.builder import Built, build, check_name, check_target, find_builder
from slurmddp.images.definition import render_definition
from slurmddp.images.exclusive import only_build
from slurmddp.images.inputs import Inputs, inputs_of
from slurmddp.images.lock import read_lock
from slurmddp.images.privilege import choose, look
from slurmddp.images.recipe import Ingredients
from slurmddp.images.workspace import make_folders, mksquashfs_options, workspace

#: Where images go that were given no name, below the folder of the command.
FOLDER = "images"
_SHOWN = 12


@dataclass(frozen=True)
class Rules:
    """What a site says of builds.

    prefer:             its container runtime, `apptainer` or `singularity`, taken first where both are there.
    cache:              a folder for downloads and for the image while it is built; None: the builder's own places.
    processors, memory: what mksquashfs may take; memory in MiB.
    """

    prefer: str | None = None
    cache: Path | None = None
    processors: int | None = None
    memory: int | None = None


@dataclass(frozen=True)
class BuildResult:
    """definition: the definition file's text; built: the image, None in a dry run and where there is nothing to do."""

    target: Path
    image: Ingredients
    definition: str
    built: Built | None
    up_to_date: bool = False


def build_image(
    target: Path | None,
    image: Ingredients,
    cwd: Path,
    force: bool,
    dry_run: bool,
    report: Callable[[str], None],
    rules: Rules = Rules(),
) -> BuildResult:
    """Render the definition of an image and build it into `target`, unless an image of these inputs is there.

    target:  None for images/NAME-HASH.sif, of the recipe's name and the inputs' hash.
    cwd:     where a relative target begins.
    dry_run: touch and run nothing; what stands in the way of a build is then said, not raised.
    report:  gets every line for people: what is about to happen, and the builder's own output as it comes.
    rules:   the site's.

    Raises UserError, ExternalError (the build failed), and Stopped (ctrl-C, SIGTERM, SIGHUP): the target is
    then as it was.
    """
    inputs = inputs_of(image, _hashed_before(target, image, cwd))
    if target is None:
        target = Path(FOLDER, f"{image.name}-{inputs.key[:_SHOWN]}.sif")
    target = Path(os.path.abspath(cwd / target))
    definition = render_definition(image, __version__)
    if dry_run:
        _preview(target, inputs, force, report)
        return BuildResult(target, image, definition, None)
    check_name(target)
    if force or not is_made_from(target, inputs):
        _refuse_other(target, inputs, force)
        built = _build(target, image, definition, inputs, force, rules, report)
        return BuildResult(target, image, definition, built)
    report(f"nothing to do: {target} was made from just these inputs; --force builds it again")
    return BuildResult(target, image, definition, None, up_to_date=True)


def _build(
    target: Path,
    image: Ingredients,
    definition: str,
    inputs: Inputs,
    force: bool,
    rules: Rules,
    report: Callable[[str], None],
) -> Built:
    builder = find_builder(rules.prefer)
    way = choose(builder.flavour, look())
    place = workspace(rules.cache, os.environ)
    squash = mksquashfs_options(builder.flavour, builder.version, rules.processors, rules.memory)
    make_folders(place)
    with only_build(target, report):
        report(f"building {target} from {image.base.reference} with {builder.name} {builder.version}")
        if way.note:
            report(f"note: {way.note}")
        facts = {
            "recipe": image.name,
            "base": image.base.reference,
            "pip": list(image.pip),
            "slurmddp": __version__,
            "inputs": inputs.facts(),
            "mode": way.mode,
        }
        return build(
            definition,
            target,
            builder,
            options=(*way.options, *squash),
            variables=place.variables,
            facts=facts,
            force=force,
            report=report,
        )


def _hashed_before(target: Path | None, image: Ingredients, cwd: Path) -> Mapping[str, Any]:
    """The hashes of files that the image's lock has; without a name, the newest lock of this recipe."""
    if target is None:
        found = sorted((cwd / FOLDER).glob(f"{glob.escape(image.name)}-*.sif"), key=os.path.getmtime)
        target = found[-1] if found else None
    lock = read_lock(Path(os.path.abspath(cwd / target))) if target is not None else None
    files = ((lock or {}).get("inputs") or {}).get("files")
    return files if isinstance(files, dict) else {}


def is_made_from(target: Path, inputs: Inputs) -> bool:
    """Whether the image is there, whole, and made from these inputs."""
    lock = read_lock(target)
    return lock is not None and (lock.get("inputs") or {}).get("key") == inputs.key


def _refuse_other(target: Path, inputs: Inputs, force: bool) -> None:
    """An image of other inputs is replaced only where that is asked for: runs may be using it."""
    lock = None if force else read_lock(target)
    if lock is not None:
        raise UserError(
            f"{target} exists already, made from other inputs ({inputs.differs(lock)})",
            todo="--force replaces it once the new image is built; or leave the name out: each one gets its own",
        )
    check_target(target, force)


def _preview(target: Path, inputs: Inputs, force: bool, report: Callable[[str], None]) -> None:
    try:
        check_name(target)
        if not force and is_made_from(target, inputs):
            report(f"note: there is nothing to do: {target} was made from just these inputs")
        else:
            _refuse_other(target, inputs, force)
    except UserError as error:
        report(f"warning: {error}")
