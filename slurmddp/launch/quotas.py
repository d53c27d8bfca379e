"""How much a user's quotas leave where a folder is: those of Lustre, Storage Scale (GPFS), and NFS, ext4 and XFS."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from slurmddp.shared.units import human

#: Seconds that a command may take: `quota` asks each NFS server.
_PATIENCE = 5.0
_MMLSQUOTA = "/usr/lpp/mmfs/bin/mmlsquota"


class Quota(NamedTuple):
    """What one quota leaves, in bytes and in files; None without a limit. whose: `your`, or `group ab12's`."""

    whose: str
    mount: str
    bytes: int | None
    files: int | None


class Mount(NamedTuple):
    """A mounted file system: a line of /proc/self/mounts."""

    device: str
    path: str
    kind: str


def quotas(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> list[Quota]:
    """Return the quotas that hold for the user in this folder, which exists; none where nothing tells of them."""
    mount = _mount(os.path.realpath(folder), mounts)
    if mount is None:
        return []
    if mount.kind == "lustre":
        return list(_lustre(folder, mount))
    if mount.kind == "gpfs":
        name = shutil.which("mmlsquota") or _MMLSQUOTA
        return list(scale(_ask(name, "-Y", os.path.basename(mount.device)), mount.path))
    return list(_row(_ask("quota", "-w", "-p", "-f", mount.path), mount.device, "your", mount.path))


def home_warning(root: Path, home: str) -> str | None:
    """Return a warning for a folder of runs in the home folder, whose quota is often small; None for another one."""
    path, home = os.path.realpath(root), os.path.realpath(home or "/")
    if home == "/" or not f"{path}/".startswith(f"{home}/"):
        return None
    while not os.path.exists(path):
        path = os.path.dirname(path)
    free = human(shutil.disk_usage(path).free)
    return (
        f"the runs folder {root} is in your home folder: its file system has {free} free, and your quota may "
        f"be smaller; for checkpoints, choose a larger file system: --set paths.runs=FOLDER"
    )


def _mount(path: str, mounts: Path) -> Mount | None:
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return None
    mounted = [Mount(*map(_plain, line.split()[:3])) for line in lines]
    # The last one of those that cover the path with the longest name: it was mounted over the others.
    return max(
        (each for each in mounted if f"{path}/".startswith(f"{each.path.rstrip('/')}/")),
        key=lambda each: len(each.path),
        default=None,
    )


def _plain(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), text)


def _lustre(folder: Path, mount: Mount) -> Iterator[Quota]:
    group = folder.stat().st_gid
    subjects = [("-u", os.getuid(), "your"), ("-g", group, f"group {group}'s")]
    project = _ask("lfs", "project", "-d", str(folder)).split()
    if project and project[0].isdecimal() and project[0] != "0":
        subjects.append(("-p", int(project[0]), f"project {project[0]}'s"))
    for option, number, whose in subjects:
        output = _ask("lfs", "quota", "-q", option, str(number), mount.path)
        yield from _row(output, mount.path, whose, mount.path)


def _row(output: str, first: str, whose: str, mount: str) -> Iterator[Quota]:
    """The eight words after `first`: KiB, soft limit, hard limit, grace; the same for files. *: over; [ ]: about."""
    words = output.split()
    if first in words:
        row = [re.sub(r"[\[\]*]", "", word) for word in words[words.index(first) + 1 :][:8]]
        yield from _left(whose, mount, row[:3], row[4:7])


def scale(said: str, mount: str) -> Iterator[Quota]:
    """Read `mmlsquota -Y`: fields between colons, whose names are in lines of their own."""
    names: list[str] = []
    for line in said.splitlines():
        fields = line.split(":")
        if "HEADER" in fields[:3]:
            names = fields
            continue
        row = dict(zip(names, fields, strict=False))
        kind, name = row.get("quotaType", ""), row.get("name", "")
        whose = "your" if kind == "USR" else f"{'group' if kind == 'GRP' else 'fileset'} {name}'s"
        space, files = (
            [row.get(f"{unit}{part}", "") for part in ("Usage", "Quota", "Limit")] for unit in ("block", "files")
        )
        yield from _left(whose, mount, space, files)


def _left(whose: str, mount: str, space: Sequence[str], files: Sequence[str]) -> Iterator[Quota]:
    kib, count = _difference(space), _difference(files)
    if kib is not None or count is not None:
        yield Quota(whose, mount, None if kib is None else kib << 10, count)


def _difference(row: Sequence[str]) -> int | None:
    """used, soft limit, hard limit -> what is left to the hard limit, or to the soft one alone; 0 is no limit."""
    if len(row) != 3 or not all(word.isdecimal() for word in row):
        return None
    used, soft, hard = map(int, row)
    return max(0, (hard or soft) - used) if hard or soft else None


def _ask(*command: str) -> str:
    """What a command prints; "" if it is not here, fails to answer in time, or prints no text."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
        )
        return process.communicate(timeout=_PATIENCE)[0]  # `quota` exits with 1 where a limit is exceeded
    except OSError:
        return ""
    except subprocess.TimeoutExpired:
        process.kill()  # and nobody waits for it: one that waits for a dead server does not end
        return ""
