"""build-image: a .sif from a recipe, an NGC release or a local base."""

from pathlib import Path
from typing import Annotated

import typer

from slurmddp.cli import options as opt
from slurmddp.cli.follow import Json


def register(app: typer.Typer) -> None:
    """Put the group's commands on the app."""
    app.command("build-image")(build_image)
    group = typer.Typer(help="Inspect, list and clean up images.", no_args_is_help=True, rich_markup_mode=None)
    group.command("list")(list_images)
    for command in (inspect, gc):
        group.command()(command)
    app.add_typer(group, name="image")


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
    job: Annotated[
        Path | None,
        typer.Option(metavar="JOB.yaml", help="What a job file says: container.recipe, base and pip, into its image."),
    ] = None,
    dockerfile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Convert a Dockerfile; its folder is the build context.")
    ] = None,
    build_arg: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="For an ARG of the Dockerfile; may be repeated.")
    ] = None,
    stage: Annotated[str | None, typer.Option(help="Stage of the Dockerfile to build; default: the last.")] = None,
    allow_files: Annotated[
        bool, typer.Option("--allow-files", help="Let a recipe copy files from outside of its own folder.")
    ] = False,
    site: opt.Site = None,
    update: Annotated[
        bool, typer.Option("--update", help="Ask whether the base's tag leads elsewhere by now.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Build it again, and replace what is there.")] = False,
    on_node: Annotated[
        bool, typer.Option("--on-node", help="Build it in a batch job, and follow that to its end.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the definition file; build nothing.")] = False,
) -> None:
    """Build an image with this machine's Apptainer or Singularity; unchanged inputs need no second build."""
    import os

    from slurmddp.images.make import Request, preview
    from slurmddp.images.make import build_image as build
    from slurmddp.launch.image import commit_of, image_of_job, rules_of, wanted_image

    cwd = Path.cwd()
    if job is not None:
        said = image_of_job(job)
        recipe, base, pip = recipe or said.recipe, base or said.base, [*said.pip, *(pip or [])]
        target, site = target or said.target, site or said.site
    options = {"base": base, "apt": apt, "pip": pip, "requirements": requirements}
    wanted = wanted_image(recipe, dockerfile, build_arg or [], stage, options, cwd, os.environ, allow_files=allow_files)
    request = Request(wanted, target, cwd, force, update, commit_of)
    if on_node:
        from slurmddp.launch.build_job import OnNode

        more = {"recipe": recipe, "dockerfile": dockerfile, "build-arg": build_arg, "stage": stage}
        batch = OnNode(request, {**more, **options}, site, os.environ, allow_files)
        if dry_run:
            typer.echo(batch.preview(opt.say), nl=False)
        else:
            _tell_built(*batch.build(opt.say))
        return
    if dry_run:
        typer.echo(preview(request, opt.say).definition, nl=False)
        return
    result = build(request, opt.say, rules_of(site) if site else lambda: rules_of(None))
    _tell_built(result.target, result.up_to_date)


def _tell_built(image: Path, up_to_date: bool) -> None:
    if up_to_date:
        opt.say("nothing to do: it was made from just these inputs; --force builds it again")
    typer.echo(image)


Folder = Annotated[Path, typer.Argument(metavar="[FOLDER]", help="Where the images are.")]


def inspect(
    image: Annotated[Path, typer.Argument(metavar="IMAGE.sif", help="An image.")],
    driver: Annotated[
        str | None, typer.Option(metavar="VERSION", help="Say whether it runs with this NVIDIA driver: 535.183.01")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(metavar="TYPE", help="The GPUs behind that driver: h100, a100, ...")
    ] = None,
    as_json: Json = False,
) -> None:
    """What an image was made from, and what is in it, by its lock."""
    from slurmddp.images.shelf import shelved
    from slurmddp.report.images import as_dict, details

    found = shelved(image)
    typer.echo(opt.json_text(as_dict(found)) if as_json else details(found, driver, gpu))


def list_images(folder: Folder = Path("images"), as_json: Json = False) -> None:
    """The images of a folder, newest first, and whether their locks are theirs."""
    from slurmddp.images.shelf import on_shelf
    from slurmddp.report.images import as_dict, table

    found = on_shelf(folder)
    typer.echo(opt.json_text([as_dict(image) for image in found]) if as_json else table(found))


def gc(
    folder: Folder = Path("images"),
    keep: Annotated[int, typer.Option(min=0, metavar="N", help="Keep the N newest of each recipe.")] = 1,
    yes: Annotated[bool, typer.Option("--yes", help="Remove them; without it they are only named.")] = False,
) -> None:
    """Remove images that newer ones have replaced and no run of yours uses, and what killed builds have left."""
    from slurmddp.images.shelf import removable
    from slurmddp.launch.image import used_images
    from slurmddp.report.images import removal

    found = removable(folder, keep, used_images())
    for path in (path for item in found for path in item.paths if yes):
        path.unlink(missing_ok=True)
    typer.echo(removal(found, done=yes))
