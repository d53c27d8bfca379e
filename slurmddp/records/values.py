"""Values of JSON files that one can calculate with."""

from typing import Any, Optional


def number(value: Any) -> Optional[float]:
    """Return a finite number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e12:  # nan fails, too
        return None
    return float(value)


def whole(value: Any) -> Optional[int]:
    """Return a whole number, or None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**15 else None
