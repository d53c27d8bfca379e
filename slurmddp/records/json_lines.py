"""A line of a JSON lines file: one object."""

import json
import math
import os
from typing import Any, Dict, Mapping, Optional

#: Bytes of a line; a longer one is none that a run writes.
LONGEST = 2**20


def load(line: bytes) -> Optional[Dict[str, Any]]:
    """Return the object of a line; None for anything else."""
    if line.lstrip()[:1] != b"{" or len(line) > LONGEST:  # a file may have millions of them
        return None
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):  # ValueError: bad UTF-8 or JSON, or a number of thousands of digits
        return None
    return record if isinstance(record, dict) else None


def dump(record: Mapping[str, Any]) -> bytes:
    """Return the line of an object. Numbers that JSON lacks (nan, inf) become null; names of files that are no UTF-8
    stay the bytes that they are. If text is no UTF-8 in another way (half of a UTF-16 pair), all such is ?.
    """
    text = json.dumps(finite(record), ensure_ascii=False, allow_nan=False) + "\n"
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return text.encode(errors="replace")


def append(path: str, line: bytes) -> None:
    """Append a line, with its end, in one write. If a full disk or a killed process left half a line, it is not joined
    to that. Raises OSError.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        cut = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        os.write(descriptor, (b"\n" if cut else b"") + line)
    finally:
        os.close(descriptor)


def finite(value: Any) -> Any:
    """Return a value of JSON with null for the numbers that JSON lacks."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
