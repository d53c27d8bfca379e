"""build-image: a .sif from a recipe, an NGC release or a local base."""

from pathlib import Path
from typing import Annotated

import typer

from slurmddp.commands import options as opt
from slurmddp.commands.follow import Json
from slurmddp.commands.help import App


def register(app: App) -> None:
    """Put the group's commands on the app."""
    app.add("Images", build_image, name="build-image", example="slurmddp build-image image.sif --base 25.04")
    group = App(help="List and inspect images")
    group.add(None, list_images, name="list")
    group.add(None, inspect, example="slurmddp image inspect image.sif --driver 535.183.01 --gpu h100")
    app.add_typer(group, name="image", rich_help_panel="Images")


def build_image(
    target: Annotated[
        Path | None, typer.Argument(metavar="IMAGE.sif", help="Image to build  [default: images/NAME-HASH.sif]")
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="Recipe: ngc-pytorch, ngc-pytorch-ofed, cpu-debian, or a file"),
    ] = None,
    base: Annotated[
        str | None, typer.Option(metavar="BASE", help="NGC release (25.04), docker://REF, a .sif, or a root folder")
    ] = None,
    apt: Annotated[list[str] | None, typer.Option(metavar="PACKAGE", help="Install with apt; may be repeated")] = None,
    pip: Annotated[list[str] | None, typer.Option(metavar="PACKAGE", help="Install with pip; may be repeated")] = None,
    requirements: Annotated[
        str | None, typer.Option(metavar="FILE", help="Install a requirements file with pip")
    ] = None,
    job: Annotated[
        Path | None,
        typer.Option(metavar="JOB.yaml", help="Take container.recipe, base, pip and image from a job file"),
    ] = None,
    dockerfile: Annotated[Path | None, typer.Option(metavar="FILE", help="Convert a Dockerfile")] = None,
    context: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Build context  [default: the folder of the Dockerfile]"),
    ] = None,
    build_arg: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Set an ARG of the Dockerfile; may be repeated")
    ] = None,
    secret: Annotated[
        list[str] | None,
        typer.Option(
            metavar="id=NAME,src=FILE",
            help="Give a secret to RUN --mount=type=secret; or id=NAME,env=VARIABLE. It does not stay in the image.",
        ),
    ] = None,
    stage: Annotated[
        str | None, typer.Option(metavar="NAME", help="Dockerfile stage to build  [default: the last]")
    ] = None,
    allow_files: Annotated[
        bool, typer.Option("--allow-files", help="Allow a recipe to copy files from outside its folder")
    ] = False,
    site: opt.Site = None,
    update: Annotated[
        bool, typer.Option("--update", help="Check whether the base tag now points to a new digest")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Build even if no input has changed, and replace the image")
    ] = False,
    on_node: Annotated[bool, typer.Option("--on-node", help="Build in a batch job and follow its log")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the definition file; build nothing")] = False,
    as_json: Json = False,
) -> None:
    """Build an image with Apptainer or Singularity. Skip the build if no input has changed."""
    import os

    from slurmddp.commands.terminal import Progress
    from slurmddp.images.make import Request, preview
    from slurmddp.images.make import build_image as build
    from slurmddp.launch.image import commit_of, image_of_job, rules_of, wanted_image

    cwd = Path.cwd()
    if job is not None:
        said = image_of_job(job)
        recipe, base, pip = recipe or said.recipe, base or said.base, [*said.pip, *(pip or [])]
        target, site = target or said.target, site or said.site
    options = {"base": base, "apt": apt, "pip": pip, "requirements": requirements}
    wanted = wanted_image(
        recipe, dockerfile, build_arg or [], stage, options, cwd, os.environ,
        context=context, secrets=secret or [], allow_files=allow_files,
    )  # fmt: skip
    request = Request(wanted, target, cwd, force, update, commit_of)
    if on_node:
        from slurmddp.launch.build_job import OnNode

        given = {
            "recipe": recipe, "dockerfile": dockerfile, "context": context, "build-arg": build_arg, "secret": secret,
            "stage": stage, **options,
        }  # fmt: skip
        batch = OnNode(request, given, site, os.environ, allow_files)
    if dry_run:
        typer.echo(batch.preview(opt.say) if on_node else preview(request, opt.say).definition, nl=False)
    elif on_node:
        _tell_built(*batch.build(opt.say), as_json=as_json)
    else:
        with Progress() as progress:
            result = build(request, opt.say, rules_of(site) if site else lambda: rules_of(None), progress.tell)
        _tell_built(result.target, result.up_to_date, as_json=as_json)


def _tell_built(image: Path, up_to_date: bool, *, as_json: bool) -> None:
    if up_to_date:
        opt.say("up to date: no input has changed since the last build (--force builds again)")
    typer.echo(opt.json_text({"image": str(image), "up_to_date": up_to_date}) if as_json else image)


Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder with the images")]


def inspect(
    image: Annotated[Path, typer.Argument(metavar="IMAGE.sif", help="Image to inspect")],
    driver: Annotated[
        str | None, typer.Option(metavar="VERSION", help="Check whether the image runs with this NVIDIA driver")
    ] = None,
    gpu: Annotated[str | None, typer.Option(metavar="TYPE", help="GPU type for that check, such as h100")] = None,
    as_json: Json = False,
) -> None:
    """Show what an image was built from and what it contains, as recorded in its lock file."""
    from slurmddp.images.inventory import shelved
    from slurmddp.report.images import as_dict, details

    found = shelved(image)
    typer.echo(opt.json_text(as_dict(found)) if as_json else details(found, driver, gpu))


def list_images(folder: Folder = Path("images"), as_json: Json = False) -> None:
    """List the images in a folder, newest first, and check each against its lock file."""
    from slurmddp.images.inventory import on_shelf
    from slurmddp.report.images import as_dict, table

    found = on_shelf(folder)
    typer.echo(opt.json_text([as_dict(image) for image in found]) if as_json else table(found))
