"""Files as one long stream of bytes, read window by window and never held in memory."""

import hashlib
import os
from bisect import bisect_right
from collections import OrderedDict
from fnmatch import fnmatchcase
from itertools import accumulate
from pathlib import Path
from typing import Any

from slurmddp.runtime.errors import UserError

_OPEN_FILES = 64
_SAMPLED_FILES = 64
_SAMPLED_BYTES = 4096


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
        """`count` bytes from offset `start`. Raises OSError where a file has become shorter or cannot be
        read.
        """
        result = bytearray()
        number = bisect_right(self._ends, start)
        while len(result) < count:
            _, path, size = self.files[number]
            offset = start + len(result) - (self._ends[number] - size)
            wanted = min(count - len(result), size - offset)
            part = os.pread(self._descriptor(number), wanted, offset)
            if len(part) != wanted:
                raise OSError(f"{path} had {size} bytes at the start, and now ends before {offset + wanted}")
            result += part
            number += 1
        return result

    def fingerprint(self) -> str:
        """Names and sizes of all files, and the first and last bytes of up to 64 of them, spread evenly."""
        digest = hashlib.sha256()
        every = max(1, len(self.files) // _SAMPLED_FILES)
        for number, (name, _, size) in enumerate(self.files):
            digest.update(f"{name}\0{size}\n".encode("utf-8", "surrogateescape"))
            if number % every == 0:
                part = min(size, _SAMPLED_BYTES)
                digest.update(os.pread(self._descriptor(number), part, 0))
                digest.update(os.pread(self._descriptor(number), part, size - part))
        return digest.hexdigest()

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


def find_files(paths: list[str], pattern: str, exclude: list[str]) -> list[tuple[str, Path, int]]:
    """Files to read: each path in turn, a folder's files that match `pattern` sorted by name.

    Nothing depends on the order that a file system gives. `exclude`: patterns over the path inside the
    folder. Empty files are left out. Raises UserError where a path is missing or cannot be read, or nothing
    is found.
    """
    found: list[tuple[str, Path, int]] = []
    for text in paths:
        root = Path(text)
        try:
            if root.is_dir():
                names = sorted(path.relative_to(root).as_posix() for path in root.glob(pattern))
                pairs = [(name, root / name) for name in names if not _excluded(name, exclude)]
            elif root.exists():
                pairs = [(root.name, root)]
            else:
                raise UserError(f"train.data.path: there is no {root}{_nearest(root)}")
            found += [(name, path, path.stat().st_size) for name, path in pairs if path.is_file()]
        except OSError as error:
            raise UserError(f"train.data.path: cannot read {error.filename}: {error.strerror}") from error
        except (ValueError, NotImplementedError) as error:
            raise UserError(f"train.data.glob {pattern!r}: {error}") from error
    found = [item for item in found if item[2] > 0]
    if not found:
        raise UserError(f"train.data: no file with content matches {pattern!r} in {', '.join(paths)}")
    return found


def _excluded(name: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _nearest(path: Path) -> str:
    """Where a missing path stops being there, which is mostly what one needs to know in a container."""
    for parent in path.parents:
        if parent.exists():
            return f" (the nearest folder that exists is {parent}); is it bound into the container?"
    return ""
