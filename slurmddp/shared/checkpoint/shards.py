"""Read shards and random states, which torch.save wrote, without torch: nothing that they name is imported or run.

Ranks load these files with torch.load(weights_only=True), which refuses the same. Standard library only.
"""

import io
import math
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slurmddp.shared.checkpoint import contents, layout

#: What torch.save writes for a tensor and plain values.
_REBUILD = {"_rebuild_tensor_v2", "_rebuild_tensor_v3"}
_ALLOWED = {
    "collections": {"OrderedDict"},
    "torch._utils": _REBUILD,
    "torch.storage": {"UntypedStorage", "TypedStorage"},
    "torch": {"Size", "device"},
}
_STORAGE = re.compile(r"[A-Z][A-Za-z0-9]*Storage")
_LARGEST = 1 << 26  # bytes of a pickle beside its tensors


def check(folder: Path, stored: Mapping[str, contents.Stored], files: Iterable[str]) -> None:
    """Check that all shards and random states name nothing but tensors. Raises layout.Rejected, OSError.

    Loading does not need it. But whoever verifies a checkpoint may load it by other means.
    """
    parts = {(name, 0, (folder / name).stat().st_size) for name in files if name.startswith(f"{layout.RNG}/")}
    parts |= {(chunk.file, chunk.start, chunk.bytes) for item in stored.values() for chunk in item.chunks}
    for part in sorted(parts):
        with _open(folder, *part):
            pass


def read(folder: Path, chunk: contents.Chunk, width: int) -> memoryview:
    """Return the bytes of a block, row by row. width: bytes of an element. Raises layout.Rejected, OSError."""
    with _open(folder, chunk.file, chunk.start, chunk.bytes) as (archive, top, tensor):
        storage, offset, size, stride = tensor.arguments[:4]
        if type(tensor).__name__ not in _REBUILD or contents.size_of(size) != chunk.sizes:
            raise ValueError(f"is not a tensor of {list(chunk.sizes)}")
        count, step = math.prod(chunk.sizes), 1
        for length, actual in zip(reversed(chunk.sizes), reversed(contents.size_of(stride)), strict=True):
            if count and length > 1 and actual != step:
                raise ValueError("is not contiguous")
            step *= length
        content = b""
        if count:
            member = archive.getinfo(f"{top}/data/{storage[2]}")
            if member.compress_type != zipfile.ZIP_STORED:  # torch.save stores; what is packed may fill the memory
                raise ValueError("is compressed")
            content = archive.read(member)
        block = memoryview(content)[offset * width : (offset + count) * width]
        if len(block) != count * width:
            raise ValueError(f"has {len(block)} bytes, not {count * width}")
        return block


@contextmanager
def _open(folder: Path, name: str, start: int, size: int) -> Iterator[tuple[zipfile.ZipFile, str, Any]]:
    """Yield the archive that torch.save wrote there, the name of its folder, and what its pickle describes."""
    try:
        with (folder / name).open("rb") as file, zipfile.ZipFile(_Part(file, start, size)) as archive:
            pickles = [member for member in archive.infolist() if member.filename.endswith(".pkl")]
            if [member.filename.rpartition("/")[2] for member in pickles] != ["data.pkl"]:
                raise contents.Refused("is not what torch.save writes for tensors")
            if pickles[0].compress_type != zipfile.ZIP_STORED or pickles[0].file_size > _LARGEST:
                raise contents.Refused("is not what torch.save writes for tensors: its pickle is too large")
            value = _Reader(io.BytesIO(archive.read(pickles[0]))).load()
            yield archive, pickles[0].filename.rpartition("/")[0], value
    except contents.Refused as refused:
        raise layout.Rejected(folder, name, str(refused)) from refused
    except OSError:
        raise
    except Exception as error:
        raise layout.Rejected(folder, name, f"is damaged at byte {start}: {type(error).__name__}: {error}") from error


class _Reader(contents.Reader):
    def allows(self, module: str, name: str) -> bool:
        return (
            name in _ALLOWED.get(module, ())
            or contents.is_dtype(module, name)
            or (module == "torch" and _STORAGE.fullmatch(name) is not None)
        )

    def persistent_load(self, pid: Any) -> Any:
        """Return a tensor's storage: bytes beside the pickle."""
        return pid


class _Part(io.RawIOBase):
    """Some bytes of an open file as a file of their own."""

    def __init__(self, file: Any, start: int, size: int) -> None:
        self._file, self._start, self._size, self._at = file, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        self._file.seek(self._start + self._at)
        count: int = self._file.readinto(view[: max(0, self._size - self._at)])
        self._at += count
        return count
