"""What an image follows from, as one hash: the same inputs need no second build.

Of files only those are read that have changed since they were last hashed, by size and time: a base of 10 GB costs
nothing. A root folder as base is known by its path alone: nobody reads all of it.
"""

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmddp.errors import UserError
from slurmddp.images.image_spec import Wanted
from slurmddp.images.provenance import read_lock, sha256


@dataclass(frozen=True)
class Inputs:
    """parts: part -> its hash or text, so that people can be told what has changed.
    files: path -> (bytes, mtime in ns, hash)."""

    parts: Mapping[str, str]
    files: Mapping[str, tuple[int, int, str]]

    @property
    def key(self) -> str:
        """64 hex digits that are equal where all parts are."""
        return hashlib.sha256(json.dumps(dict(sorted(self.parts.items()))).encode()).hexdigest()

    def facts(self) -> dict[str, Any]:
        """Return the record for the lock file."""
        files = {path: list(entry) for path, entry in self.files.items()}
        return {"key": self.key, "parts": dict(self.parts), "files": files}

    def differs(self, lock: Mapping[str, Any]) -> str:
        """Return what is not as it was when the image of this lock was made, in words."""
        then = (lock.get("inputs") or {}).get("parts")
        if not isinstance(then, dict):
            return "its lock file does not record its inputs"
        changed = sorted(name for name in {*then, *self.parts} if then.get(name) != self.parts.get(name))
        return f"changed: {', '.join(changed)}"


def inputs_of(image: Wanted, known: Mapping[str, Any] | None = None) -> Inputs:
    """Hash what the image is made from.

    known: `files` of an earlier lock, whose hashes are taken where size and time are as they were.
    Raises UserError for a file that cannot be read.
    """
    hasher = _Hasher(known or {})
    parts = {"base": image.base.reference, "definition": hashlib.sha256(image.plain.encode()).hexdigest()}
    if image.base.bootstrap != "docker" and not os.path.isdir(image.base.source):
        parts["base file"] = hasher.base(Path(image.base.source))
    for source in image.sources:
        parts[str(source)] = hasher.tree(source)
    parts |= {item.url: item.checksum for item in image.items if item.url}
    return Inputs(parts, hasher.files)


class _Hasher:
    def __init__(self, known: Mapping[str, Any]) -> None:
        self._known = known
        self.files: dict[str, tuple[int, int, str]] = {}

    def base(self, path: Path) -> str:
        """An image or archive: its own lock knows its hash already."""
        lock = read_lock(path)
        return str(lock["sha256"]) if lock and lock.get("sha256") else self.tree(path)

    def tree(self, path: Path) -> str:
        """A file's hash; of a folder, that of all names, modes, links and contents in it."""
        try:
            if not path.is_dir():
                return self._file(path)
            digest = hashlib.sha256()
            for folder, names, files in os.walk(path):
                names.sort()
                links = [name for name in names if os.path.islink(os.path.join(folder, name))]
                for name in sorted([*files, *links]):
                    entry = Path(folder, name)
                    digest.update(
                        f"{entry.relative_to(path)}\0{self._entry(entry)}\n".encode("utf-8", "surrogateescape")
                    )
            return digest.hexdigest()
        except OSError as error:
            raise UserError(f"{error.filename or path} cannot be read: {error.strerror}", where="files") from None

    def _entry(self, path: Path) -> str:
        state = path.lstat()
        if stat.S_ISLNK(state.st_mode):
            return f"link {os.readlink(path)}"
        if not stat.S_ISREG(state.st_mode):
            raise UserError(f"{path} is neither a file, a folder nor a link", where="files", todo="remove it")
        return f"{state.st_mode & 0o777:o} {self._file(path)}"

    def _file(self, path: Path) -> str:
        state = path.stat()
        then = self._known.get(str(path))
        if isinstance(then, list) and then[:2] == [state.st_size, state.st_mtime_ns] and len(then) == 3:
            digest = str(then[2])
        else:
            digest = sha256(path)
        self.files[str(path)] = (state.st_size, state.st_mtime_ns, digest)
        return digest
