"""Checks that shards and random states name nothing but tensors, without torch: for `checkpoint verify`.

Ranks need it not: they load these files with torch.load(weights_only=True), which refuses the same. But whoever
verifies a checkpoint may load it by other means. Standard library only.
"""

import io
import re
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from slurmddp.shared.checkpoint import contents, layout

#: What torch.save writes for a tensor and plain values.
_ALLOWED = {
    "collections": {"OrderedDict"},
    "torch._utils": {"_rebuild_tensor_v2", "_rebuild_tensor_v3"},
    "torch.storage": {"UntypedStorage", "TypedStorage"},
    "torch": {"Size", "device"},
}
_STORAGE = re.compile(r"[A-Z][A-Za-z0-9]*Storage")
_LARGEST = 1 << 26  # bytes of a pickle beside its tensors


def check(folder: Path, stored: Mapping[str, contents.Stored], files: Iterable[str]) -> None:
    """Look at each part of each shard, and at all random states. Raises layout.Rejected, OSError."""
    for name in sorted(files):
        if name.startswith(f"{layout.RNG}/"):
            _check(folder, name, 0, (folder / name).stat().st_size)
    for name, start, size in sorted({(one.file, one.start, one.bytes) for x in stored.values() for one in x.chunks}):
        _check(folder, name, start, size)


def _check(folder: Path, name: str, start: int, size: int) -> None:
    try:
        with (folder / name).open("rb") as file, zipfile.ZipFile(_Part(file, start, size)) as archive:
            pickles = [member for member in archive.infolist() if member.filename.endswith(".pkl")]
            if [member.filename.rpartition("/")[2] for member in pickles] != ["data.pkl"]:
                raise contents.Refused("is not what torch.save writes for tensors")
            if pickles[0].compress_type != zipfile.ZIP_STORED or pickles[0].file_size > _LARGEST:
                raise contents.Refused("is not what torch.save writes for tensors: its pickle is too large")
            _Reader(io.BytesIO(archive.read(pickles[0]))).load()
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
