"""A line of a JSON lines file: one object."""

import json
import math
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
    stay the bytes that they are.
    """
    text = json.dumps(_finite(record), ensure_ascii=False, allow_nan=False) + "\n"
    return text.encode(errors="surrogateescape")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
