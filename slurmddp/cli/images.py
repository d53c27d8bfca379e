"""build-image: a .sif from a recipe, an NGC release or a local base."""

from pathlib import Path
from typing import Annotated

import typer

from slurmddp.cli import options as opt


def register(app: typer.Typer) -> None:
    """Put the group's commands on the app."""
    app.command("build-image")(build_image)


def build_image(
    target: Annotated[
        Path | None, typer.Argument(metavar="[IMAGE.sif]", help="The image to make; default: images/NAME-HASH.sif.")
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="What to make: ngc-pytorch, ngc-pytorch-ofed, cpu-debian, or a file."),
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="NGC release (25.04), docker://REF, a .sif, or a root folder.")
    ] = None,
    apt: Annotated[list[str] | None, typer.Option(metavar="PACKAGE", help="Install with apt; may be repeated.")] = None,
    pip: Annotated[list[str] | None, typer.Option(metavar="PACKAGE", help="Install with pip; may be repeated.")] = None,
    requirements: Annotated[
        str | None, typer.Option(metavar="FILE", help="Install a requirements file with pip.")
    ] = None,
    site: opt.Site = None,
    force: Annotated[bool, typer.Option("--force", help="Build it again, and replace what is there.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the definition file; build nothing.")] = False,
) -> None:
    """Build an image with this machine's Apptainer or Singularity; unchanged inputs need no second build."""
    import os

    from slurmddp.errors import UserError
    from slurmddp.images.make import build_image as build
    from slurmddp.images.recipe import read_recipe
    from slurmddp.launch.image import rules_of

    if recipe is None and base is None:
        todo = "--recipe ngc-pytorch, or --base 25.04 (an NGC release, docker://REF, a .sif, a root folder)"
        raise UserError("nothing says what the image is made from", todo=todo)
    options = {"base": base, "apt": apt, "pip": pip, "requirements": requirements}
    image = read_recipe(recipe, options, Path.cwd(), os.environ)
    result = build(target, image, Path.cwd(), force, dry_run, opt.say, rules_of(site))
    if dry_run:
        typer.echo(result.definition, nl=False)
    else:
        typer.echo(result.target)
