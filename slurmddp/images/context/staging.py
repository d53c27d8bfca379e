"""The files that a definition file takes from this machine, gathered in a folder beside it, in which the builder runs.

Apptainer's own %files from the host follows links, forgets times, and shows names to a shell. From another stage it
copies all as it is. So what is gathered becomes the root of a stage, whose content the others take.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from slurmddp.errors import UserError

_KEYS = {"source": "src", "src": "src", "env": "env", "id": "id", "type": "type"}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def read_secrets(options: Iterable[str], cwd: Path, environment: Mapping[str, str]) -> dict[str, Item]:
    """Return what is put beside the definition, by id. Raises UserError, never with a value in it."""
    secrets: dict[str, Item] = {}
    for option in options:
        fields = {_KEYS.get(name, ""): value for name, _, value in (part.partition("=") for part in option.split(","))}
        name = fields.get("id", "")
        if "" in fields or not _NAME.fullmatch(name) or ("src" in fields and "env" in fields):
            todo = "write id=NAME,src=FILE or id=NAME,env=VARIABLE"
            raise UserError(f"--secret {option.split('=')[0]}=... is not understood", where="--secret", todo=todo)
        itself = "src" not in fields and (fields.get("type") == "env" or name in environment)
        variable = fields.get("env") or (name if itself else "")
        place = f"{SECRETS}/{name}"
        if variable:
            if variable not in environment:
                raise UserError(f"the variable {variable} is not set", where="--secret", todo="export it")
            secrets[name] = Item(place, Path(), text=environment[variable])
            continue
        path = (cwd / fields.get("src", name)).expanduser().resolve()
        if not path.is_file():
            raise UserError(f"there is no file {path}", where="--secret", todo="name the file of the secret: src=FILE")
        secrets[name] = Item(place, path)
    return secrets


#: The folders' names in definition files. Secrets are no part of that stage: only who asks for one gets it.
FOLDER, SECRETS = "files", "secrets"


@dataclass(frozen=True)
class Item:
    """What is put at `place`: a copy of `path` and all below it, or a file of this `text`."""

    place: str
    path: Path
    whole: bool = True  # False for a folder's mode and time alone
    text: str | None = field(default=None, repr=False)
    url: str = ""  # of what is fetched first, and its checksum as `where` gives it, or ""
    checksum: str = ""
    where: str = ""


@contextlib.contextmanager
def gathered(items: Iterable[Item], folder: Path) -> Iterator[None]:
    """Gather these; gone afterwards. Raises UserError."""
    copies = _Copies(folder)
    items = tuple(items)
    try:
        for item in items:
            place = folder / item.place
            place.parent.mkdir(parents=True, exist_ok=True)
            if item.text is not None:
                place.touch(0o600)
                place.write_text(item.text, encoding="utf-8", errors="surrogateescape")
            elif item.whole:
                copies.put(item.path, place)
            else:
                place.mkdir(exist_ok=True)
        for item in reversed(items):  # the time of a folder changes with what comes into it
            if not item.whole:
                shutil.copystat(item.path, folder / item.place)
    except OSError as error:
        todo = "make it readable, or write the image to a file system with enough free space"
        raise UserError(f"cannot copy {error.filename or folder} for the build: {error.strerror}", todo=todo) from None
    else:
        yield
    finally:
        for name in (FOLDER, SECRETS):
            _remove(folder / name)


def _remove(root: Path) -> None:
    for top, names, _ in os.walk(root):
        for path in (os.path.join(top, name) for name in names):
            if not os.path.islink(path):
                os.chmod(path, 0o700)  # one that is not writable would keep what is in it
    shutil.rmtree(root, ignore_errors=True)


class _Copies:
    """Copies that stay linked to each other as their originals are.

    folder: what they go to, `.IMAGE.sif.XXXX.part`. An image may be built in its context, and no file of a build of it
            is a part of that.
    """

    def __init__(self, folder: Path) -> None:
        self._own = os.path.realpath(folder).rsplit(".", 2)[0] + "."
        self._made: dict[tuple[int, int], Path] = {}

    def put(self, path: Path, place: Path) -> None:
        """Copy a file, a link or a folder. Raises OSError."""
        state = path.lstat()
        if stat.S_ISLNK(state.st_mode):
            shutil.copyfile(path, place, follow_symlinks=False)
            shutil.copystat(path, place, follow_symlinks=False)
        elif stat.S_ISDIR(state.st_mode):
            place.mkdir(exist_ok=True)
            for entry in os.scandir(path):
                if not os.path.realpath(entry.path).startswith(self._own):
                    self.put(Path(entry.path), place / entry.name)
            shutil.copystat(path, place)
        elif stat.S_ISREG(state.st_mode):
            inode = (state.st_dev, state.st_ino)
            if inode in self._made:
                place.hardlink_to(self._made[inode])
            else:
                self._file(path, place, state)
                self._made[inode] = place

    def _file(self, path: Path, place: Path, state: os.stat_result) -> None:
        """A hard link costs no space. With one user id, a build cannot unpack files of another user or group."""
        if (state.st_uid, state.st_gid) == (os.geteuid(), os.getegid()):
            with contextlib.suppress(OSError):  # another file system, or one without links
                place.hardlink_to(path)
                return
        shutil.copy2(path, place)
