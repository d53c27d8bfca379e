"""Slurm's times and seconds."""

import re

_FORM = re.compile(
    r"(?P<days>\d+)-(?P<day_hours>\d+)(?::(?P<day_minutes>\d+)(?::(?P<day_seconds>\d+))?)?"
    r"|(?P<hours>\d+):(?P<hour_minutes>\d+):(?P<hour_seconds>\d+)"
    r"|(?P<minutes>\d+)(?::(?P<minute_seconds>\d+))?",
    re.ASCII,
)
_UNLIMITED = frozenset({"UNLIMITED", "INFINITE", "-1"})


def seconds_of(text: str) -> int | None:
    """Return seconds of a Slurm time; None for UNLIMITED.

    The forms are those of sbatch(1), --time: minutes, minutes:seconds, hours:minutes:seconds, days-hours,
    days-hours:minutes and days-hours:minutes:seconds. A part may be larger than its unit (90:00), as in
    Slurm. Raises ValueError for any other text. Note that sbatch reads a limit of 0 as no limit.
    """
    text = text.strip()
    if text.upper() in _UNLIMITED:
        return None
    match = _FORM.fullmatch(text)
    if not match:
        raise ValueError(
            f"{text!r} is not a Slurm time: minutes, minutes:seconds, hours:minutes:seconds, days-hours, "
            "days-hours:minutes, days-hours:minutes:seconds or UNLIMITED"
        )
    part = {name: int(value) if value else 0 for name, value in match.groupdict().items()}
    hours = part["days"] * 24 + part["day_hours"] + part["hours"]
    minutes = part["day_minutes"] + part["hour_minutes"] + part["minutes"]
    return hours * 3600 + minutes * 60 + part["day_seconds"] + part["hour_seconds"] + part["minute_seconds"]


def limit_of(text: str | None) -> int | None:
    """Return seconds of a time limit that Slurm prints; None for no limit, and for words (Partition_Limit, NONE)."""
    try:
        return seconds_of(text or "")
    except ValueError:
        return None
