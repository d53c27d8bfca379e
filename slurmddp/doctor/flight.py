"""Flight recorder dumps: which rank did not join which collective. PyTorch writes one per rank on a timeout."""

from __future__ import annotations

import io
import pickle
import re
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

#: A dump is a pickle: protocol byte, then a dictionary.
_BEGIN = b"\x80"
_BYTES = 64 << 20
_RANK = re.compile(r"(\d+)(?:\.\w+)?$")


class Waiting(NamedTuple):
    """Where one rank was. group: the process group; last: the newest collective that it called; first: the oldest one
    that is not over, with its name. Gloo's collectives never become `completed`, but `retired`."""

    rank: int
    group: str
    last: int
    first: tuple[int, str] | None


class _Plain(pickle.Unpickler):
    """Loads containers, numbers and text. A dump of PyTorch has nothing else, and a foreign pickle runs nothing."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a flight recorder dump")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("a reference is no part of a flight recorder dump")


def is_dump(handle: BinaryIO) -> bool:
    """Return whether the file begins as a dump does; its position stays at the start."""
    begins = handle.read(1) == _BEGIN
    handle.seek(0)
    return begins


def read_dump(path: Path, handle: BinaryIO) -> list[Waiting]:
    """Return where the rank was, one entry per process group. Raises ValueError if it is no dump."""
    rank = _RANK.search(path.name)
    data = handle.read(_BYTES + 1)
    if rank is None or len(data) > _BYTES:
        raise ValueError("has no rank in its name, or is too large")
    try:
        entries = _Plain(io.BytesIO(data)).load()["entries"]
        return _waiting(int(rank[1]), entries)
    except Exception as error:  # a damaged pickle raises nearly anything
        raise ValueError(f"is no flight recorder dump: {error}") from error


def _waiting(rank: int, entries: list[dict[str, Any]]) -> list[Waiting]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        if not entry.get("is_p2p"):
            groups.setdefault(str(entry.get("process_group", "")), []).append(entry)
    return [Waiting(rank, group, *_progress(found)) for group, found in groups.items()]


def _progress(found: list[dict[str, Any]]) -> tuple[int, tuple[int, str] | None]:
    numbers = [int(entry["collective_seq_id"]) for entry in found]
    open_ones = [
        (int(entry["collective_seq_id"]), str(entry.get("profiling_name", "")).rpartition(":")[2])
        for entry in found
        if entry.get("state") != "completed" and not entry.get("retired")
    ]
    return max(numbers), min(open_ones, default=None)
