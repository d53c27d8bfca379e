"""image list, image inspect: images on disk."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from slurmddp.commands import options as opt
from slurmddp.commands.help import App
from slurmddp.commands.listed import BY_NAME
from slurmddp.images.driver import check
from slurmddp.images.inventory import Removable, Shelved, on_shelf, shelved
from slurmddp.shared.units import human
from slurmddp.styled import Style, columns, join, styled
from slurmddp.visible import one_line

_PACKAGES = 12
_STYLES: dict[str, Style] = {"whole": "good", "changed": "warn", "unreadable": "bad"}
_BY_TABLE = " (by the table of NGC releases: the lock file has no answer of a registry)"


def as_dict(image: Shelved) -> dict[str, Any]:
    """Return an image for --json. The keys are stable; `lock` is the lock file, empty if it is for another image."""
    return {
        "path": str(image.path),
        "bytes": image.bytes,
        "modified": round(image.mtime, 3),
        "state": image.state,
        "cuda": image.cuda.cuda,
        "driver": image.cuda.driver,
        "lock": dict(image.lock),
    }


def table(images: Sequence[Shelved]) -> str:
    """Return one line per image, newest first."""
    if not images:
        return "no images in this folder"
    rows: list[tuple[str, ...]] = [("IMAGE", "SIZE", "MADE", "RECIPE", "BASE", "TORCH", "STATE")]
    for image in images:
        made = "-" if image.state == "unreadable" else time.strftime("%Y-%m-%d %H:%M", time.localtime(image.mtime))
        facts = (one_line(str(image.lock.get(key) or "-")) for key in ("recipe", "base", "torch"))
        state = styled(image.state, _STYLES.get(image.state))
        rows.append((one_line(image.path.name), human(image.bytes), made, *facts, state))
    return join("\n", columns(rows))


def details(image: Shelved, driver: str | None, gpu: str | None) -> str:
    """Return what is known about one image and, with a driver, whether it runs there."""
    lock, reported = image.lock, image.lock.get("registry") or {}
    states = {
        "whole": "matches its lock file",
        "changed": "CHANGED since the lock file was written, or copied without its modification time (use cp -p "
        "or rsync -a)",
        "no lock": "no lock file: slurmddp did not build the image, or .lock.json was not copied with it",
    }
    builder = lock.get("builder") or {}
    rows = [
        ("image", str(image.path)),
        ("size", human(image.bytes)),
        ("state", states[image.state]),
        ("sha256", lock.get("sha256")),
        ("recipe", lock.get("recipe")),
        ("base", lock.get("base")),
        ("digest", reported.get("digest")),
        ("torch", lock.get("torch") or reported.get("torch")),
        ("CUDA", image.cuda.cuda and f"{image.cuda.cuda}{'' if reported.get('cuda') else _BY_TABLE}"),
        ("NCCL", reported.get("nccl")),
        ("driver", image.cuda.driver and f"{image.cuda.driver} (released with its CUDA)"),
        ("built", lock.get("created") and f"{lock['created']} on {lock.get('host')}"),
        ("by", builder and f"{builder.get('name')} {builder.get('version')}, {lock.get('mode')}"),
        ("packages", _packages(lock.get("packages"))),
    ]
    lines = [one_line(f"{name:<9} {value}") for name, value in rows if value]
    if driver is not None:
        verdict = check(image.cuda, driver, gpu=gpu)
        lines += ["", f"{'on ' + driver:<9} {verdict.why}", *([f"  -> {verdict.todo}"] if verdict.todo else [])]
    return "\n".join(lines)


def _packages(packages: object) -> str | None:
    if not isinstance(packages, list):
        return None
    more = f", and {len(packages) - _PACKAGES} more (--json shows all)" if len(packages) > _PACKAGES else ""
    return ", ".join(map(str, packages[:_PACKAGES])) + more


def removal_text(found: Sequence[Removable], *, done: bool) -> str:
    if not found:
        return "nothing to remove"
    lines = [one_line(f"{item.paths[0].name}  {human(item.bytes)}  {item.why}") for item in found]
    total = human(sum(item.bytes for item in found))
    lines.append(f"removed: {total}" if done else f"to remove: {total}")
    return "\n".join(lines)


def removal_dict(found: Sequence[Removable], *, done: bool) -> dict[str, Any]:
    """Return the same for --json: names in the folder."""
    items = [{"files": [path.name for path in item.paths], "bytes": item.bytes, "why": item.why} for item in found]
    return {"removed": items, "bytes": sum(item.bytes for item in found), "done": done}


Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder with the images")]


def inspect(
    image: Path = opt.argument("IMAGE.sif", "Image to inspect", default=...),
    driver: str | None = opt.value("VERSION", "Check whether the image runs with this NVIDIA driver"),
    gpu: str | None = opt.value("TYPE", "GPU type for that check, such as h100"),
    as_json: opt.Json = False,
) -> None:
    """Show what an image was built from and what it contains, as recorded in its lock file."""
    shelved_image = shelved(image)
    typer.echo(opt.json_text(as_dict(shelved_image)) if as_json else details(shelved_image, driver, gpu))


def list_images(folder: Folder = Path("images"), as_json: opt.Json = False) -> None:
    """List the images in a folder, newest first, and check each against its lock file."""
    images = on_shelf(folder)
    typer.echo(opt.json_text([as_dict(image) for image in images]) if as_json else table(images))


group = App(name="image", help=BY_NAME["image"].summary)
group.add(list_images, "list")
group.add(inspect, example="slurmddp image inspect image.sif --driver 535.183.01 --gpu h100")
