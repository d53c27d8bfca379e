"""Flight recorder dumps: which rank did not join which collective. PyTorch writes one per rank on a timeout."""

import re
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from slurmddp.doctor.plain_pickle import load

#: A dump is a pickle: protocol byte, then a dictionary.
_BEGIN = b"\x80"
_BYTES = 64 << 20
#: Entries of a dump (PyTorch keeps 2000 by default), and characters of a name in it.
_ENTRIES, _NAME = 100_000, 200
_RANK = re.compile(r"(\d+)(?:\.\w+)?$")


class Waiting(NamedTuple):
    """Where one rank was. group: the process group; last: the newest collective that it called; first: the oldest one
    that is not over, with its name. Gloo's collectives never become `completed`, but `retired`."""

    rank: int
    group: str
    last: int
    first: tuple[int, str] | None


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
        return _waiting(int(rank[1]), load(data))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"is not a flight recorder dump: {error}") from error


def _waiting(rank: int, dump: Any) -> list[Waiting]:
    if not isinstance(dump, dict) or not isinstance(entries := dump.get("entries"), list) or len(entries) > _ENTRIES:
        raise ValueError(f"it has no list of at most {_ENTRIES} entries")
    groups: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        if not isinstance(entry, dict):
            raise ValueError("an entry is not a dictionary")
        if not entry.get("is_p2p"):
            groups.setdefault(_group(entry.get("process_group", "")), []).append(entry)
    return [Waiting(rank, group, *_progress(of_group)) for group, of_group in groups.items()]


def _group(value: Any) -> str:
    """Return the process group as text: its name, or (name, description)."""
    parts = value if isinstance(value, (tuple, list)) else (value,)
    if len(parts) > 8 or not all(isinstance(part, str) for part in parts):
        raise ValueError("a process group is not text")
    cut = tuple(part[:_NAME] for part in parts)
    return str(cut) if parts is value else cut[0]


def _progress(entries: list[dict[str, Any]]) -> tuple[int, tuple[int, str] | None]:
    numbers = [number for entry in entries if isinstance(number := entry.get("collective_seq_id"), int)]
    if len(numbers) < len(entries):
        raise ValueError("an entry has no collective_seq_id")
    open_ones = [
        (number, str(entry.get("profiling_name", ""))[:_NAME].rpartition(":")[2])
        for number, entry in zip(numbers, entries, strict=True)
        if entry.get("state") != "completed" and not entry.get("retired")
        if isinstance(entry.get("profiling_name", ""), str)
    ]
    return max(numbers), min(open_ones, default=None)
