"""Files as one long stream of bytes, read window by window and never held in memory."""

import hashlib
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from fnmatch import fnmatchcase
from itertools import accumulate
from pathlib import Path
from typing import Any

from slurmddp.runtime.errors import UserError

_OPEN_FILES = 64
_SAMPLED_FILES = 64
_SAMPLED_BYTES = 4096
_SAMPLED_PLACES = 256


class ByteStream:
    """The bytes of many files, one after the other, addressed by offset.

    Files come in the order given. Reads go through pread on a few descriptors kept open, so forked workers
    may share them; pickling leaves them behind.
    """

    def __init__(self, files: list[tuple[str, Path, int]]) -> None:
        """`files`: name (for messages and the fingerprint), path and bytes of each."""
        self.files = files
        self._ends = list(accumulate(size for *_, size in files))
        self._open: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, count: int) -> bytearray:
        """Return `count` bytes from offset `start`. Raises OSError as `read_file` does."""
        result = bytearray()
        number = bisect_right(self._ends, start)
        while len(result) < count:
            size = self.files[number][2]
            offset = start + len(result) - (self._ends[number] - size)
            result += self.read_file(number, offset, min(count - len(result), size - offset))
            number += 1
        return result

    def read_file(self, number: int, start: int, count: int) -> bytes:
        """Return `count` bytes of one file. Raises OSError if it has become shorter or cannot be read."""
        _, path, size = self.files[number]
        part = os.pread(self._descriptor(number), count, start)
        if len(part) != count:
            raise OSError(f"{path} had {size} bytes at the start, and is now shorter than {start + count}")
        return part

    def fingerprint(self) -> str:
        return fingerprint([(name, size) for name, _, size in self.files], self.read_file)

    def name_at(self, offset: int) -> str:
        """Return the path of the file that a byte comes from, and the byte's offset there, for messages."""
        number = bisect_right(self._ends, offset)
        _, path, size = self.files[number]
        return f"{path}, byte {offset - (self._ends[number] - size)}"

    def _descriptor(self, number: int) -> int:
        descriptor = self._open.pop(number, None)
        if descriptor is None:
            if len(self._open) >= _OPEN_FILES:
                os.close(self._open.popitem(last=False)[1])
            descriptor = os.open(self.files[number][1], os.O_RDONLY)
        self._open[number] = descriptor
        return descriptor

    def __getstate__(self) -> dict[str, Any]:
        return {"files": self.files}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["files"])  # type: ignore[misc]


def fingerprint(files: list[tuple[str, int]], read: Callable[[int, int, int], bytes]) -> str:
    """Hash names and sizes (bytes) of all files, and pieces of the content of up to 64 of them.

    `read`: number of the file, offset and count to bytes. The files are spread evenly, and so are the pieces, from a
    file's first byte to its last; a single large file is read in 256 places. What lies between goes unnoticed.
    """
    digest = hashlib.sha256()
    every = -(-len(files) // _SAMPLED_FILES)
    pieces = max(2, _SAMPLED_PLACES // min(max(1, len(files)), _SAMPLED_FILES))
    for number, (name, size) in enumerate(files):
        digest.update(f"{name}\0{size}\n".encode("utf-8", "surrogateescape"))
        if number % every == 0:
            count = min(size, _SAMPLED_BYTES)
            for start in sorted({(size - count) * piece // (pieces - 1) for piece in range(pieces)}):
                digest.update(read(number, start, count))
    return digest.hexdigest()


def find_files(
    paths: list[str], pattern: str, exclude: list[str], suffixes: tuple[str, ...] = ()
) -> list[tuple[str, Path, int]]:
    """Return files to read: each path in turn, a folder's files that match `pattern` sorted by name.

    Nothing depends on the order that a file system gives. `exclude`: patterns over the path inside the
    folder. `suffixes`: how the names in a folder have to end, if not empty. Empty files are left out. Raises
    UserError where a path is missing or cannot be read, or nothing is found.
    """
    found: list[tuple[str, Path, int]] = []
    for text in paths:
        root = Path(text)
        try:
            if root.is_dir():
                names = sorted(path.relative_to(root).as_posix() for path in root.glob(pattern))
                names = [name for name in names if not suffixes or name.endswith(suffixes)]
                names = [name for name in names if not any(fnmatchcase(name, pattern) for pattern in exclude)]
                pairs = [(name, root / name) for name in names]
            elif root.exists():
                pairs = [(root.name, root)]
            else:
                raise UserError(f"train.data.path: {root} does not exist{_nearest(root)}")
            found += [(name, path, path.stat().st_size) for name, path in pairs if path.is_file()]
        except OSError as error:
            raise UserError(f"train.data.path: cannot read {error.filename}: {error.strerror}") from error
        except (ValueError, NotImplementedError) as error:
            raise UserError(f"train.data.glob {pattern!r}: {error}") from error
    found = [item for item in found if item[2] > 0]
    if not found:
        kinds = f" and ends with {' or '.join(suffixes)}" if suffixes else ""
        raise UserError(f"train.data: no file with content matches {pattern!r}{kinds} in {', '.join(paths)}")
    return found


def _nearest(path: Path) -> str:
    """Return where a missing path stops being there, which is mostly what one needs to know in a container."""
    for parent in path.parents:
        if parent.exists():
            return f" (but {parent} does): check that it is bound into the container"
    return ""
