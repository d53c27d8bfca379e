"""What a script of the user's own has saved: the newest save that is whole, told by its content, not by its name.

A file counts that torch.save, pickle or safetensors have written, or HDF5; and a folder that has such files. One that
is cut off, since its writer was killed, does not count, nor does a folder of torch.distributed.checkpoint without its
`.metadata`, which is written last. Symbolic links are left out: what they point to counts where it lies. So are files
and folders of other users, and folders with such files: to load one may run code.
"""

import glob
import json
import os
import stat
import zipfile
from typing import Iterable, Iterator, List, NamedTuple, Optional, Tuple

#: Files that are looked at in one folder: one with more is no save of a training.
_MOST_FILES = 100000
#: How files of torch.save begin that are older than its zip files, and say nothing of their length.
_OLD_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_LONGEST_HEADER = 10 * 2**20
WHOLE, BROKEN, OTHER = "whole", "broken", "other"


class Save(NamedTuple):
    """A file or a folder. time: of its newest file, unix seconds. bytes: of all its files."""

    path: str
    time: float
    bytes: int


def newest(places: Iterable[str], since: Optional[float] = None) -> Optional[Save]:
    """Return the newest whole save in these places; None without one. since: older ones do not count, unix seconds.

    A place is a folder, whose entries may be saves; a file; or a pattern (`out/step-*`), of whose matches each may be
    a save, whether it is a file or a folder. What cannot be read is no save.
    """
    saves = [save for place in places for path in _entries(place) for save in [measure(path)] if save is not None]
    for save in sorted(saves, key=lambda one: one.time, reverse=True):
        if since is not None and save.time < since:
            return None
        if _is_whole(save.path):
            return save
    return None


def _entries(place: str) -> List[str]:
    if glob.has_magic(place) and not os.path.lexists(place):
        return glob.glob(place)
    try:
        names = os.listdir(place)
    except NotADirectoryError:
        return [place]
    except OSError:
        return []
    return [os.path.join(place, name) for name in names if not name.startswith(".")]


def _files(path: str) -> Iterator[Tuple[str, os.stat_result]]:
    """Yield the regular files of a folder, or the file itself. Raises OSError, also for those of other users."""
    facts = _own(path)
    if stat.S_ISREG(facts.st_mode):
        yield path, facts
    elif stat.S_ISDIR(facts.st_mode):
        for folder, _, names in os.walk(path, onerror=_refuse):
            _own(folder)
            for name in names:
                file = os.path.join(folder, name)
                facts = _own(file)
                if stat.S_ISREG(facts.st_mode):
                    yield file, facts


def _own(path: str) -> os.stat_result:
    """Return the facts of a file, folder or link of this user's. Raises OSError."""
    facts = os.lstat(path)
    if facts.st_uid != os.geteuid():
        raise PermissionError("{} belongs to another user".format(path))
    return facts


def _refuse(error: OSError) -> None:
    raise error


def measure(path: str) -> Optional[Save]:
    """Return a file or folder with its time and size, whether it is a save or not; None if it is not there."""
    time, size, count = 0.0, 0, 0
    try:
        for _, facts in _files(path):
            time, size, count = max(time, facts.st_mtime), size + facts.st_size, count + 1
            if count > _MOST_FILES:
                return None
    except OSError:
        return None  # somebody may just be removing it
    return Save(path, time, size) if size else None


def _is_whole(path: str) -> bool:
    try:
        kinds = {_kind(file) for file, _ in _files(path)}
    except (OSError, RecursionError, MemoryError):
        return False
    return WHOLE in kinds and BROKEN not in kinds


def _kind(path: str) -> str:
    """Return whether a file is a save. Raises OSError."""
    if path.endswith(".distcp"):  # of any content
        return WHOLE if os.path.exists(os.path.join(os.path.dirname(path), ".metadata")) else BROKEN
    # It may have been replaced since it was listed: by a link, or by a pipe, at which others wait for ever.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
            raise PermissionError("{} is no file of this user's".format(path))
        size = facts.st_size
        head = file.read(len(_OLD_TORCH))
        if head.startswith(b"PK\x03\x04"):
            return WHOLE if zipfile.is_zipfile(file) else BROKEN
        if head == _OLD_TORCH or head.startswith(b"\x89HDF\r\n"):
            return WHOLE
        if head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05" and size > 2:
            file.seek(-1, os.SEEK_END)
            return WHOLE if file.read(1) == b"." else BROKEN
        length = int.from_bytes(head[:8], "little")
        if head[8:9] != b"{" or length > _LONGEST_HEADER:
            return OTHER
        file.seek(8)
        return _safetensors(file.read(length), length, size)


def _safetensors(header: bytes, length: int, size: int) -> str:
    """https://huggingface.co/docs/safetensors: the length of a header, the header, and the tensors that it lists."""
    try:
        listed = json.loads(header.decode("utf-8"))
        end = max([one["data_offsets"][1] for name, one in listed.items() if name != "__metadata__"] or [0])
        return WHOLE if size >= 8 + length + end else BROKEN
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return BROKEN
