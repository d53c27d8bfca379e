"""Files that are hashed while they are written, and synced when they are closed.

Reading them again for the hash would cost a second pass over what may be many gigabytes on a shared file
system.
"""

import contextlib
import hashlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from slurmddp.records.checkpoint import FileFacts

_BUFFER = 1 << 20


class HashedFile(io.RawIOBase):
    """A file that is written from its beginning to its end.

    An error is kept, not raised, by `write`, which torch calls from C++ code that takes exceptions badly;
    `tell` and `end` raise it. After an error nothing more is written.
    """

    def __init__(self, file: IO[bytes], path: Path) -> None:
        super().__init__()
        self._file, self._path = file, path
        self._digest, self._size = hashlib.sha256(), 0
        self._error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        """Append bytes, or any buffer of them. Large ones are hashed and written without holding the GIL."""
        size = memoryview(content).nbytes
        if self._error is None:
            try:
                self._file.write(content)
                self._digest.update(content)
            except OSError as error:
                self._error = error
        self._size += size
        return size

    def flush(self) -> None:
        """Nothing: `end` does it once."""

    def tell(self) -> int:
        """Return bytes so far. Raises OSError if one of them could not be written."""
        self._check()
        return self._size

    def end(self) -> FileFacts:
        """Wait until the content is on stable storage. Raises OSError that names the file."""
        self._check()
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            self._error = error
        self._check()
        found = os.fstat(self._file.fileno()).st_size
        if found != self._size:
            raise OSError(f"{self._path} has {found} bytes after {self._size} were written")
        return FileFacts(self._size, self._digest.hexdigest())

    def _check(self) -> None:
        if self._error is not None:
            raise OSError(self._error.errno, self._error.strerror, str(self._path)) from self._error


@contextlib.contextmanager
def hashed(path: Path, facts: dict[str, FileFacts]) -> Iterator[HashedFile]:
    """Write a new file; at the end of the block it is on stable storage, and in `facts` under its name."""
    file = path.open("wb", buffering=_BUFFER)
    try:
        stream = HashedFile(file, path)
        yield stream
        facts[path.name] = stream.end()
    finally:
        with contextlib.suppress(OSError):  # What its buffer still held; the block has failed with the reason.
            file.close()
