"""Where a build keeps its downloads and its unpacked image, what it may take of the machine, and whether it fits."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slurmddp.errors import UserError
from slurmddp.shared.beneath import written_by_others

_FAMILY = ("APPTAINER", "SINGULARITY")
#: Of the compressed layers' size: what the cache, the unpacked root, and the image itself take. NVIDIA's PyTorch images
#: unpack to a good two times their layers.
_CACHED, _UNPACKED, _PACKED = 1.0, 2.5, 1.1
_GB = 1e9
_ELSEWHERE = "set APPTAINER_CACHEDIR and APPTAINER_TMPDIR to other folders"


@dataclass(frozen=True)
class Workspace:
    """cache: of layers and blobs, kept between builds; temporary: the root file system while it is built."""

    cache: Path
    temporary: Path
    variables: Mapping[str, str]  # for the builder's environment. What the user has set stays as it is.
    closed: tuple[str, ...] = ()  # folders that nobody else may write to: the user has not named them


def workspace(root: Path | None, environment: Mapping[str, str]) -> Workspace:
    """The folders of a build: what the user's variables name, else below `root`, else the builder's own places.

    root: the site's folder for caches, off a home with a quota; None where the profile names none.
    """
    variables: dict[str, str] = {}
    closed: tuple[str, ...] = ()
    cache = _named("CACHEDIR", environment)
    temporary = _named("TMPDIR", environment)
    if root is not None:
        ours = str(root / "images" / "cache"), str(root / "images" / "tmp")  # not /tmp: often small, or memory
        closed = tuple(path for path, given in zip(ours, (cache, temporary), strict=True) if not given)
        cache, temporary = cache or ours[0], temporary or ours[1]
        variables = {f"{family}_{word}": path for family in _FAMILY for word, path in _words(cache, temporary)}
    home = environment.get("HOME") or "/"
    return Workspace(
        Path(cache or f"{home}/.apptainer/cache"),
        Path(temporary or environment.get("TMPDIR") or "/tmp"),
        variables,
        closed,
    )


def _words(cache: str, temporary: str) -> tuple[tuple[str, str], tuple[str, str]]:
    return ("CACHEDIR", cache), ("TMPDIR", temporary)


def _named(word: str, environment: Mapping[str, str]) -> str | None:
    return next((value for family in _FAMILY if (value := environment.get(f"{family}_{word}"))), None)


def mksquashfs_options(flavour: str, version: str, processors: int | None, memory: int | None) -> tuple[str, ...]:
    """Return what limits mksquashfs, which takes all cores and a quarter of the memory of a login node that others use.

    processors: at most so many; memory: MiB. Apptainer takes --mksquashfs-args from 1.4 on; for others there is only
    what the administrators set (`mksquashfs procs` and `mksquashfs mem` in their configuration).
    """
    numbers = [int(part) if part.isdigit() else 0 for part in version.split("-")[0].split("+")[0].split(".")[:2]]
    if flavour != "apptainer" or numbers < [1, 4] or (processors is None and memory is None):
        return ()
    words = ([f"-processors {processors}"] if processors else []) + ([f"-mem {memory}M"] if memory else [])
    return ("--mksquashfs-args", " ".join(words))


def unpacked(layers: float) -> str:
    """Return the space that a root file system of these compressed layers takes, for people."""
    return f"about {_UNPACKED * layers / _GB:.1f} GB"


def check_space(layers: int | None, target: Path, area: Workspace, roots: int | None = None) -> None:
    """Raise UserError where a build of an image whose layers have so many bytes cannot fit.

    layers: compressed, as the registry tells; None: unknown, and then nothing is refused. roots: likewise, of all root
    file systems that are unpacked, one for each stage; None: one for each base. What lies on one file system
    is added up. A quota is not seen by this: the builder's own message is explained then.
    """
    if layers is None:
        return
    needs: dict[int, tuple[float, list[str], Path]] = {}
    for what, size, folder in (
        ("the cache", _CACHED * layers, area.cache),
        ("the unpacked image", _UNPACKED * (roots or layers), area.temporary),
        ("the image", _PACKED * layers, target.parent),
    ):
        there = _existing(folder)
        total, words, _ = needs.get(there.stat().st_dev, (0.0, [], there))
        needs[there.stat().st_dev] = (total + size, [*words, f"{what} in {folder}"], there)
    for total, words, there in needs.values():
        free = shutil.disk_usage(there).free
        if free < total:
            needed, there_are = f"{total / _GB:.1f} GB", f"{free / _GB:.1f} GB are free"
            raise UserError(
                f"the build needs about {needed} for {' and '.join(words)}, and {there_are}",
                todo="free some space, or use other folders: APPTAINER_CACHEDIR, APPTAINER_TMPDIR, the folder "
                "of the image",
            )


def make_folders(area: Workspace) -> None:
    """The folders of `variables` have to be there before the builder looks for them. Raises UserError.

    The builder believes what it finds in them, so those that the user has not named must be closed to others.
    """
    for name in set(area.variables.values()):
        try:
            os.makedirs(name, mode=0o700, exist_ok=True)
            facts = os.stat(name)
        except OSError as error:
            raise UserError(f"{name} cannot be made: {error.strerror}", todo=_ELSEWHERE) from None
        if name in area.closed and (facts.st_uid != os.geteuid() or written_by_others(facts)):
            raise UserError(f"{name} is a folder in which other users can put files", todo=_ELSEWHERE)


def _existing(path: Path) -> Path:
    """The folder, or the nearest above it that is there."""
    return next(folder for folder in (path, *path.parents) if folder.exists())
