"""build-image: a .sif from an NGC tag or a local base."""

from pathlib import Path
from typing import Annotated

import typer

from slurmddp.cli import options as opt


def register(app: typer.Typer) -> None:
    """Put the group's commands on the app."""
    app.command("build-image")(build_image)


def build_image(
    target: Annotated[Path, typer.Argument(metavar="IMAGE.sif", help="The image to make.")],
    base: Annotated[str, typer.Option(help="NGC release (25.04), docker://REF, a .sif, or a root folder.")],
    pip: Annotated[list[str] | None, typer.Option(metavar="PACKAGE", help="Install with pip; may be repeated.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an image that exists.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the definition file; build nothing.")] = False,
) -> None:
    """Render a definition file and build it with this machine's Apptainer or Singularity."""
    from slurmddp.images.make import build_image as build

    result = build(target, base, tuple(pip or ()), Path.cwd(), force, dry_run, opt.say)
    if result.built is None:
        typer.echo(result.definition, nl=False)
    else:
        typer.echo(result.built.image)
