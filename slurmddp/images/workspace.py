"""Where a build keeps its downloads and its unpacked image, what it may take of the machine, and whether it fits."""

import contextlib
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from slurmddp.errors import UserError
from slurmddp.records.owners import written_by_others

#: Where in %post: the folder's name, by which the definition knows in /proc/self/mountinfo that /tmp is its own.
_FOLDERS = {"/tmp": "slurmddp-tmp", "/var/tmp": "slurmddp-var-tmp"}
_PREFIX = "slurmddp-"
#: The name of the link to a build's temporary folders, in the folder of its drafts.
RECORD = "temporary"
#: The name of the file in that folder that is locked while the build is running.
HELD = "held"
#: `build --bind` came with Singularity 3.8; every Apptainer has it.
_FIRST = (3, 8)


@contextlib.contextmanager
def own_tmp(
    flavour: str, version: str, area: Path, report: Callable[[str], None], record: Path | None = None
) -> Iterator[tuple[tuple[str, ...], dict[str, str]]]:
    """The builder's options and variables for fresh temporary folders in `area`, which are gone afterwards.

    They are its /tmp, its /var/tmp, and the folder for what it unpacks. Only this user reaches them, and in %post every
    user of the build. record: a link to them that is made, so that they are found if this process is killed.
    Raises UserError where they cannot be made.
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if flavour != "apptainer" and numbers and (int(numbers[1]), int(numbers[2])) < _FIRST:
        report(
            f"note: singularity {version} cannot give a build its own /tmp (3.8 can): what %post deletes or writes"
            " in /tmp and /var/tmp, it does to this machine's"
        )
        yield (), {}
        return
    # A colon or a comma would end the path in --bind
    path = os.path.abspath(area)
    parent = path if os.path.isdir(path) and not re.search(r"[:,\\]", path) else "/tmp"
    try:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    except OSError as error:
        todo = "set APPTAINER_TMPDIR to a folder that you can write to"
        raise UserError(f"cannot create a folder in {parent}: {error.strerror}", todo=todo) from None
    try:
        if record:
            record.symlink_to(folder)
        options: tuple[str, ...] = ()
        for inside, name in _FOLDERS.items():
            (folder / name).mkdir()
            (folder / name).chmod(0o1777)
            options += ("--bind", f"{folder / name}:{inside}")
        # Not where the place has been changed: /tmp may be too small for what is unpacked
        names = ("APPTAINER_TMPDIR", "SINGULARITY_TMPDIR") if parent == path else ()
        (folder / "builder").mkdir()
        yield options, dict.fromkeys(names, str(folder / "builder"))
    finally:
        if not remove_tree(folder):
            report(f"note: {folder} could not be removed: it has files of other users of the build")


def recorded(record: Path) -> Path | None:
    """Return the temporary folder that a killed build recorded; None if it is not here, or not this user's."""
    try:
        folder = Path(os.readlink(record))
        state = folder.lstat()
    except OSError:
        return None
    mine = stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid() == record.lstat().st_uid
    return folder if mine and folder.name.startswith(_PREFIX) else None


def remove_tree(folder: Path) -> bool:
    """Remove it with what other users of the build left there, which takes the build's own kind of root."""
    shutil.rmtree(folder, ignore_errors=True)
    for ids in (["--map-auto"], []):
        if folder.exists():
            command = ["unshare", "--user", "--map-root-user", *ids, "rm", "-rf", f"./{folder.name}"]
            with contextlib.suppress(OSError):
                # In its folder: in there, a path by a descriptor of this process leads nowhere.
                subprocess.run(command, cwd=folder.parent, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    return not folder.exists()


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
        words = (("CACHEDIR", cache), ("TMPDIR", temporary))
        variables = {f"{family}_{word}": path for family in _FAMILY for word, path in words}
    home = environment.get("HOME") or "/"
    temporary = temporary or environment.get("TMPDIR") or "/tmp"
    return Workspace(Path(cache or f"{home}/.apptainer/cache"), Path(temporary), variables, closed)


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
    for part, size, folder in (
        ("the cache", _CACHED * layers, area.cache),
        ("the unpacked image", _UNPACKED * (roots or layers), area.temporary),
        ("the image", _PACKED * layers, target.parent),
    ):
        there = next(place for place in (folder, *folder.parents) if place.exists())
        total, words, _ = needs.get(there.stat().st_dev, (0.0, [], there))
        needs[there.stat().st_dev] = (total + size, [*words, f"{part} in {folder}"], there)
    for total, words, there in needs.values():
        free = shutil.disk_usage(there).free
        if free < total:
            needed, there_are = f"{total / _GB:.1f} GB", f"{free / _GB:.1f} GB are free"
            todo = (
                "free some space, or use other folders: APPTAINER_CACHEDIR, APPTAINER_TMPDIR, the folder of the image"
            )
            raise UserError(f"the build needs about {needed} for {' and '.join(words)}, and {there_are}", todo=todo)


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
