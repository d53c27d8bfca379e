"""What `slurmddp build-image` does, without its options and its printing."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slurmddp import __version__
from slurmddp.errors import UserError
from slurmddp.images.builder import Built, build, check_target, find_builder
from slurmddp.images.definition import render_definition
from slurmddp.images.recipe import Ingredients


@dataclass(frozen=True)
class BuildResult:
    """definition: the definition file's text; built: the image, None in a dry run."""

    target: Path
    image: Ingredients
    definition: str
    built: Built | None


def build_image(
    target: Path,
    image: Ingredients,
    cwd: Path,
    force: bool,
    dry_run: bool,
    report: Callable[[str], None],
    *,
    prefer: str | None = None,
) -> BuildResult:
    """Render the definition of an image and build it into `target`.

    cwd:     where a relative target begins.
    dry_run: touch and run nothing; what stands in the way of a build is then said, not raised.
    report:  gets every line for people: what is about to happen, and the builder's own output as it comes.
    prefer:  the site's container runtime, `apptainer` or `singularity`, taken first where both are there.

    Raises UserError, ExternalError (the build failed), and Stopped (ctrl-C, SIGTERM, SIGHUP): the target is
    then as it was.
    """
    target = Path(os.path.abspath(cwd / target))
    definition = render_definition(image, __version__)
    if dry_run:
        try:
            check_target(target, force)
        except UserError as error:
            report(f"warning: {error}")
        return BuildResult(target, image, definition, None)
    check_target(target, force)  # before any program is looked for
    builder = find_builder(prefer)
    report(f"building {target} from {image.base.reference} with {builder.name} {builder.version}")
    built = build(definition, target, builder, base=image.base, pip=image.pip, force=force, report=report)
    return BuildResult(target, image, definition, built)
