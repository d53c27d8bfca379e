"""Figures for people: bytes, large numbers, durations, long lists."""

from collections.abc import Sequence


def short(number: float) -> str:
    """Return a number with three digits and a suffix: 12345 as 12.3k."""
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= limit:
            return f"{number / limit:.1f}{letter}"
    return f"{number:.0f}" if abs(number) >= 10 else f"{number:.2f}"


def human(size: float) -> str:
    """Return bytes with a unit: 512 B, 1.5 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def clock(seconds: float) -> str:
    """Return seconds as 1:23 or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def listed(names: Sequence[str], most: int) -> str:
    """Return the first names with commas, and how many more there are: `n1, n2, n3 and 5 more`."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
