"""A /tmp and a /var/tmp of the build's own: without them %post has those of the machine, other people's files and all.

`RUN rm -rf /tmp/*` would delete the user's files on the login node, and the root file system of the build itself.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from slurmddp.errors import UserError

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
        own = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    except OSError as error:
        todo = "set APPTAINER_TMPDIR to a folder that you can write to"
        raise UserError(f"cannot create a folder in {parent}: {error.strerror}", todo=todo) from None
    try:
        if record:
            record.symlink_to(own)
        options: tuple[str, ...] = ()
        for inside, name in _FOLDERS.items():
            (own / name).mkdir()
            (own / name).chmod(0o1777)
            options += ("--bind", f"{own / name}:{inside}")
        # Not where the place has been changed: /tmp may be too small for what is unpacked
        names = ("APPTAINER_TMPDIR", "SINGULARITY_TMPDIR") if parent == path else ()
        (own / "builder").mkdir()
        yield options, dict.fromkeys(names, str(own / "builder"))
    finally:
        if not remove_tree(own):
            report(f"note: {own} could not be removed: it has files of other users of the build")


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
